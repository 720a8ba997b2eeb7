"""CRC32C with and without the package that it comes in."""

import crc32c as package
import pytest

from bookie_server.api import entry as checksum


@pytest.mark.parametrize("as_package", [False, True])
def test_it_is_the_checksum_of_rfc_3720_and_goes_on_from_one_before(monkeypatch, as_package):
    if as_package:
        monkeypatch.setattr(checksum, "EXTENSION", "crc32c.elsewhere")
    crc32c = checksum.find_crc32c()
    assert (crc32c is package.crc32c) == as_package
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(memoryview(b"56789"), crc32c(b"1234")) == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_what_the_package_lacks_is_taken_from_it_as_a_whole(monkeypatch):
    monkeypatch.setattr(checksum, "PACKAGE", "no_such_package")
    assert checksum.crc32c_without_its_package() is None
