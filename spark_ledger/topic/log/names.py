"""Names of topics, and names of anything as one level of a metadata path.

Always true: a topic has one full name, `persistent://tenant/namespace/name`; a bare `name` means
tenant `public`, namespace `default`. To Pulsar's clients partition 3 of `t` is `t-partition-3`, so
no topic is made with such a name. `escape` is one-to-one, so two app ids never share a record.
"""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from spark_ledger import errors
from spark_ledger.metadata import paths

DEFAULT_TENANT = "public"
DEFAULT_NAMESPACE = "default"
DEFAULT_FULL_NAMESPACE = f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}"
NAME_CHARS_MAX = 200

_SCHEME = "persistent://"
_PARTITION = re.compile(r"(.+)-partition-(\d+)")
_NAME_PART = re.compile(r"[-=:.\w]+", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    tenant: str
    namespace: str
    name: str

    @property
    def full(self) -> str:
        return f"{_SCHEME}{self.tenant}/{self.namespace}/{self.name}"

    @property
    def short(self) -> str:
        """The name that a user types: bare in the default namespace, else the full name."""
        default = (self.tenant, self.namespace) == (DEFAULT_TENANT, DEFAULT_NAMESPACE)
        return self.name if default else self.full

    @property
    def path(self) -> str:
        """The path of the node with the topic's id."""
        return paths.topic_name(self.tenant, self.namespace, self.name)

    def __str__(self) -> str:
        return self.short


def parse_topic(text: str) -> TopicName:
    """The topic that `text` names: `name`, `tenant/namespace/name`, or
    `persistent://tenant/namespace/name`.

    Raises errors.TopicNameInvalid; TypeError if `text` is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"a topic's name is text, not {text!r}")
    parts = text.removeprefix(_SCHEME).split("/")
    if len(parts) == 1 and not text.startswith(_SCHEME):
        parts = [DEFAULT_TENANT, DEFAULT_NAMESPACE, *parts]
    if len(parts) != 3 or not all(_is_valid(part) for part in parts):
        raise errors.TopicNameInvalid(
            f"'{text}' is no name of a topic: letters, digits and -=:._ up to"
            f" {NAME_CHARS_MAX} characters",
            topic=text,
        )
    return TopicName(*parts)


def _is_valid(part: str) -> bool:
    has_name_chars = _NAME_PART.fullmatch(part) is not None and len(part) <= NAME_CHARS_MAX
    return has_name_chars and part not in (".", "..")


def parse_partition_name(topic: TopicName) -> tuple[TopicName, int] | None:
    """The topic and the partition's number if the name is a partition's name, else None."""
    match = _PARTITION.fullmatch(topic.name)
    if match is None:
        return None
    return TopicName(topic.tenant, topic.namespace, match[1]), int(match[2])


def parse_namespace(text: str) -> tuple[str, str]:
    """The tenant and the name within it, from `tenant/name`. Raises errors.TopicNameInvalid."""
    parts = text.split("/")
    if len(parts) != 2 or not all(_is_valid(part) for part in parts):
        raise errors.TopicNameInvalid(
            f"'{text}' is no namespace", "A namespace is `tenant/name`, e.g. public/default."
        )
    return parts[0], parts[1]


def parse_tenant(text: str) -> str:
    """Raises errors.TopicNameInvalid."""
    if not _is_valid(text):
        raise errors.TopicNameInvalid(f"'{text}' is no tenant", "A tenant is e.g. public.")
    return text


def escape(text: str) -> str:
    """`text`, percent-encoded, as one level of a path. Raises ValueError for the empty text."""
    if not text:
        raise ValueError("an empty text cannot be a level of a path")
    if not text.strip("."):
        return text.replace(".", "%2E")
    return quote(text, safe="")


def unescape(level: str) -> str:
    return unquote(level)
