from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Status]
    NO_SUCH_ENTRY: _ClassVar[Status]
    NO_SUCH_LEDGER: _ClassVar[Status]
    FENCED: _ClassVar[Status]
    UNAUTHORIZED: _ClassVar[Status]
    WRONG_BOOKIE: _ClassVar[Status]
    BUSY: _ClassVar[Status]
    READ_ONLY: _ClassVar[Status]
    IO_ERROR: _ClassVar[Status]
    LIMBO: _ClassVar[Status]
    BAD_DIGEST: _ClassVar[Status]
    CONFLICTING_ENTRY: _ClassVar[Status]
    TOO_LARGE: _ClassVar[Status]
    BAD_REQUEST: _ClassVar[Status]
    LEDGER_DELETED: _ClassVar[Status]
    SHUTTING_DOWN: _ClassVar[Status]
    METADATA_UNAVAILABLE: _ClassVar[Status]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_OF_RANGE: _ClassVar[StopReason]
    BYTE_LIMIT: _ClassVar[StopReason]
OK: Status
NO_SUCH_ENTRY: Status
NO_SUCH_LEDGER: Status
FENCED: Status
UNAUTHORIZED: Status
WRONG_BOOKIE: Status
BUSY: Status
READ_ONLY: Status
IO_ERROR: Status
LIMBO: Status
BAD_DIGEST: Status
CONFLICTING_ENTRY: Status
TOO_LARGE: Status
BAD_REQUEST: Status
LEDGER_DELETED: Status
SHUTTING_DOWN: Status
METADATA_UNAVAILABLE: Status
END_OF_RANGE: StopReason
BYTE_LIMIT: StopReason

class Add(_message.Message):
    __slots__ = ("recovery", "token", "entry")
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    recovery: bool
    token: bytes
    entry: bytes
    def __init__(self, recovery: _Optional[bool] = ..., token: _Optional[bytes] = ..., entry: _Optional[bytes] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("bookie_id", "adds")
    BOOKIE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDS_FIELD_NUMBER: _ClassVar[int]
    bookie_id: str
    adds: _containers.RepeatedCompositeFieldContainer[Add]
    def __init__(self, bookie_id: _Optional[str] = ..., adds: _Optional[_Iterable[_Union[Add, _Mapping]]] = ...) -> None: ...

class AddResult(_message.Message):
    __slots__ = ("status", "retry_after_ms", "reason")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    status: Status
    retry_after_ms: int
    reason: str
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AddResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AddResult]
    def __init__(self, results: _Optional[_Iterable[_Union[AddResult, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("bookie_id", "ledger_id", "first_entry", "last_entry", "max_bytes", "fence", "token")
    BOOKIE_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    LAST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    bookie_id: str
    ledger_id: int
    first_entry: int
    last_entry: int
    max_bytes: int
    fence: bool
    token: bytes
    def __init__(self, bookie_id: _Optional[str] = ..., ledger_id: _Optional[int] = ..., first_entry: _Optional[int] = ..., last_entry: _Optional[int] = ..., max_bytes: _Optional[int] = ..., fence: _Optional[bool] = ..., token: _Optional[bytes] = ...) -> None: ...

class EntryResult(_message.Message):
    __slots__ = ("status", "entry")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    status: Status
    entry: bytes
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., entry: _Optional[bytes] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("status", "retry_after_ms", "reason", "last_add_confirmed", "results", "stop")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_ADD_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    status: Status
    retry_after_ms: int
    reason: str
    last_add_confirmed: int
    results: _containers.RepeatedCompositeFieldContainer[EntryResult]
    stop: StopReason
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ..., last_add_confirmed: _Optional[int] = ..., results: _Optional[_Iterable[_Union[EntryResult, _Mapping]]] = ..., stop: _Optional[_Union[StopReason, str]] = ...) -> None: ...

class ReadLacRequest(_message.Message):
    __slots__ = ("bookie_id", "ledger_id", "fence", "token", "previous_lac", "wait_ms")
    BOOKIE_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_LAC_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    bookie_id: str
    ledger_id: int
    fence: bool
    token: bytes
    previous_lac: int
    wait_ms: int
    def __init__(self, bookie_id: _Optional[str] = ..., ledger_id: _Optional[int] = ..., fence: _Optional[bool] = ..., token: _Optional[bytes] = ..., previous_lac: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ReadLacResponse(_message.Message):
    __slots__ = ("status", "retry_after_ms", "reason", "last_add_confirmed", "fenced")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_ADD_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    status: Status
    retry_after_ms: int
    reason: str
    last_add_confirmed: int
    fenced: bool
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ..., last_add_confirmed: _Optional[int] = ..., fenced: _Optional[bool] = ...) -> None: ...

class WriteLacRequest(_message.Message):
    __slots__ = ("bookie_id", "ledger_id", "last_add_confirmed", "token")
    BOOKIE_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_ADD_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    bookie_id: str
    ledger_id: int
    last_add_confirmed: int
    token: bytes
    def __init__(self, bookie_id: _Optional[str] = ..., ledger_id: _Optional[int] = ..., last_add_confirmed: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class WriteLacResponse(_message.Message):
    __slots__ = ("status", "retry_after_ms", "reason")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    status: Status
    retry_after_ms: int
    reason: str
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("bookie_id",)
    BOOKIE_ID_FIELD_NUMBER: _ClassVar[int]
    bookie_id: str
    def __init__(self, bookie_id: _Optional[str] = ...) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("status", "bookie_id", "state", "reason", "free_bytes", "total_bytes", "ledgers", "entry_bytes_max", "version")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BOOKIE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    status: Status
    bookie_id: str
    state: str
    reason: str
    free_bytes: int
    total_bytes: int
    ledgers: int
    entry_bytes_max: int
    version: str
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., bookie_id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., ledgers: _Optional[int] = ..., entry_bytes_max: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...
