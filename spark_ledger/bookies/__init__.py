"""The way to bookies: which there are, typed calls, many adds in one message, frames."""
