"""The ports of a node: frames, the gRPC gateway, its registration."""
