"""How a node starts: directories, replay, self test."""
