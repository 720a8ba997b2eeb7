"""CRC32C, by the processor.

The crc32c package asks for its own version when it is imported, and so reads the metadata of all
that is on the path: 50 ms in a process whose path has Spark's archives. Its function is loaded
without the package, or with it where it is not laid out as we know it.
"""

import importlib.util
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, PathFinder

Checksum = Callable[..., int]

PACKAGE, EXTENSION = "crc32c", "crc32c._crc32c"


def _without_its_package() -> Checksum | None:
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.submodule_search_locations is None:
        return None
    spec = PathFinder.find_spec(EXTENSION, package.submodule_search_locations)
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "crc32c", None)


def _crc32c() -> Checksum:
    found = _without_its_package()
    if found is not None:
        return found
    from crc32c import crc32c as whole

    return whole


crc32c = _crc32c()
"""crc32c(data, value=0): the checksum of `data`, going on from `value`."""
