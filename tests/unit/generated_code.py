"""Code that protoc generates, as it would be made today."""


def code_of(text):
    """Without what only names the compiler's version."""
    volatile = ("# Protobuf Python Version", "GRPC_GENERATED_VERSION = ")
    lines = [line for line in text.splitlines() if not line.startswith(volatile)]
    start = next(
        (i for i, line in enumerate(lines) if "ValidateProtobufRuntimeVersion(" in line), 0
    )
    return lines if not start else lines[:start] + lines[start + 7 :]
