"""Entry logs, direct logs and the index of where entries are in them."""
