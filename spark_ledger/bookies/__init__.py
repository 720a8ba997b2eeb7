"""The way to bookies: who they are, typed calls, many adds in one message, frames."""
