"""Tenants and namespaces: made, listed, deleted. Policies of namespaces: log/topics.py.

Always true: a tenant or namespace exists as long as its node exists; `public` and `public/default`
exist without a node. The store refuses to delete a tenant that has namespaces, or a namespace that
has topics, so no topic is ever left without its namespace. While bookies hold the metadata store
(it went back in time), every change is refused.
"""

import random
from contextlib import suppress

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.store import (
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NotEmpty,
    Operation,
    OutcomeUnknown,
    Set,
)
from spark_ledger.metadata.store_calls import Tries, ensure, names_in, read, unavailable_while
from spark_ledger.topic.log import records
from spark_ledger.topic.log.names import (
    DEFAULT_FULL_NAMESPACE,
    DEFAULT_NAMESPACE,
    DEFAULT_TENANT,
    parse_namespace,
    parse_tenant,
)
from spark_ledger.topic.log.policies import NamespacePolicies
from spark_ledger.topic.log.records import TenantRecord
from spark_ledger.topic.log.topics import namespace_not_found


class Namespaces:
    """Methods raise errors.TopicNameInvalid, and errors.Unavailable if the store fails
    (`unavailable_while`). Methods that change something also raise errors.MetadataHeld,
    errors.CommitContended."""

    def __init__(self, store: MetadataStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng

    # -- tenants -----------------------------------------------------------------------------

    async def tenants(self) -> list[str]:
        with unavailable_while("listing tenants"):
            await self._store.sync(paths.TOPICS)
            return sorted({DEFAULT_TENANT, *await names_in(self._store, paths.TOPICS)})

    async def tenant(self, tenant: str) -> TenantRecord:
        """Raises errors.NamespaceNotFound."""
        path = paths.tenant(parse_tenant(tenant))
        with unavailable_while(f"reading tenant '{tenant}'"):
            await self._store.sync(path)
            node = await read(self._store, path)
        if node is None and tenant != DEFAULT_TENANT:
            raise _no_tenant(tenant)
        return records.decode_tenant(b"" if node is None else node.value)

    async def create_tenant(self, tenant: str, record: TenantRecord) -> None:
        """Raises errors.NamespaceExists."""
        path = paths.tenant(parse_tenant(tenant))
        with unavailable_while(f"creating tenant '{tenant}'"):
            await ensure(self._store, paths.TOPICS)
            is_made = tenant != DEFAULT_TENANT and await self._create(
                path, records.encode_tenant(record)
            )
        if not is_made:
            raise errors.NamespaceExists(f"there is a tenant '{tenant}' already")

    async def change_tenant(self, tenant: str, record: TenantRecord) -> None:
        """Raises errors.NamespaceNotFound."""
        await self.tenant(tenant)
        path, value = paths.tenant(tenant), records.encode_tenant(record)
        with unavailable_while(f"changing tenant '{tenant}'"):
            if tenant == DEFAULT_TENANT:
                await ensure(self._store, path)
            tries = Tries(self._rng)
            while True:
                node = await read(self._store, path)
                if node is None:
                    raise _no_tenant(tenant)
                if node.value == value:
                    return
                with suppress(MultiFailed, OutcomeUnknown):
                    await multi_unless_held(self._store, [Set(path, value, node.version)])
                    return
                await tries.retry_or_raise(f"others changed tenant '{tenant}' again and again")
                await self._store.sync(path)

    async def delete_tenant(self, tenant: str) -> None:
        """Raises errors.NamespaceNotFound, errors.NamespaceInUse (the tenant has namespaces)."""
        await self.tenant(tenant)
        if tenant == DEFAULT_TENANT:
            raise _always_there(f"tenant '{tenant}'")
        with unavailable_while(f"deleting tenant '{tenant}'"):
            await self._delete(paths.tenant(tenant), f"tenant '{tenant}' has namespaces")

    # -- namespaces --------------------------------------------------------------------------

    async def of_tenant(self, tenant: str) -> list[str]:
        """The tenant's namespaces, as `tenant/name`. Raises errors.NamespaceNotFound."""
        await self.tenant(tenant)
        with unavailable_while(f"listing the namespaces of tenant '{tenant}'"):
            names = {*await names_in(self._store, paths.tenant(tenant))}
        if tenant == DEFAULT_TENANT:
            names.add(DEFAULT_NAMESPACE)
        return [f"{tenant}/{name}" for name in sorted(names)]

    async def check(self, namespace: str) -> None:
        """Raises errors.NamespaceNotFound."""
        path = paths.namespace(*parse_namespace(namespace))
        if namespace == DEFAULT_FULL_NAMESPACE:
            return
        with unavailable_while(f"reading namespace '{namespace}'"):
            await self._store.sync(path)
            node = await read(self._store, path)
        if node is None:
            raise namespace_not_found(namespace)

    async def create(self, namespace: str, policies: NamespacePolicies) -> None:
        """Makes the namespace with these policies, in one step. Raises errors.NamespaceNotFound (no
        such tenant exists), errors.NamespaceExists."""
        tenant, name = parse_namespace(namespace)
        await self.tenant(tenant)
        with unavailable_while(f"creating namespace '{namespace}'"):
            if tenant == DEFAULT_TENANT:
                await ensure(self._store, paths.tenant(tenant))
            try:
                is_made = namespace != DEFAULT_FULL_NAMESPACE and await self._create(
                    paths.namespace(tenant, name), records.encode_namespace(policies)
                )
            except MultiFailed:  # the tenant was deleted meanwhile
                raise _no_tenant(tenant) from None
        if not is_made:
            raise errors.NamespaceExists(f"there is a namespace '{namespace}' already")

    async def delete(self, namespace: str) -> None:
        """Raises errors.NamespaceNotFound, errors.NamespaceInUse (the namespace has topics)."""
        await self.check(namespace)
        if namespace == DEFAULT_FULL_NAMESPACE:
            raise _always_there(f"namespace '{namespace}'")
        with unavailable_while(f"deleting namespace '{namespace}'"):
            path = paths.namespace(*parse_namespace(namespace))
            await self._delete(path, f"namespace '{namespace}' has topics")

    # -- nodes -------------------------------------------------------------------------------

    async def _create(self, path: str, value: bytes) -> bool:
        """Returns whether this call made the node (after a lost response: whether the node has this
        value). Raises MultiFailed if the parent node is gone."""
        operations: list[Operation] = [Create(path, value)]
        try:
            await multi_unless_held(self._store, operations)
        except MultiFailed as failed:
            if isinstance(failed.cause, NodeExists):
                return False
            raise
        except OutcomeUnknown:
            await self._store.sync(path)
            node = await read(self._store, path)
            if node is None:
                return await self._create(path, value)
            return node.value == value
        return True

    async def _delete(self, path: str, in_use: str) -> None:
        tries = Tries(self._rng)
        while (node := await read(self._store, path)) is not None:
            try:
                await multi_unless_held(self._store, [Delete(path, node.version)])
                return
            except MultiFailed as failed:
                if isinstance(failed.cause, NotEmpty):
                    raise errors.NamespaceInUse(in_use) from None
            except OutcomeUnknown:
                pass
            await tries.retry_or_raise(f"others changed {path} again and again")
            await self._store.sync(path)


def _no_tenant(tenant: str) -> errors.NamespaceNotFound:
    return errors.NamespaceNotFound(f"there is no tenant '{tenant}'")


def _always_there(what: str) -> errors.NamespaceInUse:
    return errors.NamespaceInUse(f"{what} always exists", "Delete the topics in it instead.")
