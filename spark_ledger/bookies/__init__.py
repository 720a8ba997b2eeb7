"""The way to the bookies: who they are, typed calls, frames of many adds, and gRPC beneath."""
