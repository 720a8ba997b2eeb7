"""The data of PROTOBUF_NATIVE schemas: descriptors of Protobuf, in JSON. Pure.

    {"fileDescriptorSet":"<base64>", "rootMessageTypeName":"shop.Order",
     "rootFileDescriptorName":"shop.proto"}

Always true: the order of the files does not count, because the client for Go sends them in any
order.
"""

import json
from base64 import b64decode
from graphlib import TopologicalSorter
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError


class Descriptors(NamedTuple):
    """`root` is the full name of the message that values are; `root_file` is the name of its file,
    one of `files`."""

    root: str
    root_file: str
    files: frozenset[bytes]


def descriptors_of(data: bytes) -> Descriptors:
    """Raises one of errors.MALFORMED."""
    plain = json.loads(data)
    root, root_file = plain["rootMessageTypeName"], plain["rootFileDescriptorName"]
    try:
        files = FileDescriptorSet.FromString(b64decode(plain["fileDescriptorSet"], validate=True))
    except DecodeError as error:
        raise ValueError(f"fileDescriptorSet is no set of descriptors: {error}") from error
    return Descriptors(root, root_file, frozenset(f.SerializeToString() for f in files.file))


def check(data: bytes) -> None:
    """Check that the descriptors are complete. Raises one of errors.MALFORMED."""
    descriptors = descriptors_of(data)
    files = {file.name: file for file in map(FileDescriptorProto.FromString, descriptors.files)}
    imports = {name: file.dependency for name, file in files.items()}
    pool = DescriptorPool()
    for name in TopologicalSorter(imports).static_order():
        pool.Add(files[name])
    if pool.FindMessageTypeByName(descriptors.root).file.name != descriptors.root_file:
        raise ValueError(f"{descriptors.root} is not in {descriptors.root_file}")
