"""The newest run of a Spark query: two runs of one query never write concurrently.

Each start of a query is a new run, which takes the query over, as a driver that is restarted after
a crash does. The previous run writes no more batches: its driver was presumed dead, or belongs to a
different query with a copy of the checkpoint, so that the batches of each would be mistaken for the
other's.

The run is recorded in one object, `staging/<query>/run.json`, which each batch reads and each start
replaces. If two runs start concurrently, the one that puts it last takes over. The record is swept
after 30 days; a run that is still writing then records itself again.
"""

from __future__ import annotations

from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from sparklog import errors
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.staging import manifest

NAME: Final = "run.json"
_REPLACED_KEPT: Final = 32
"""The number of earlier runs that stay refused."""


class QueryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run of `query`, and the first batch that it has committed."""

    query: str
    run: str
    first_batch: Annotated[int, Meta(ge=0)]
    replaced: tuple[str, ...] = ()
    """The runs before it, newest last."""

    def next(self, run: str, batch: int) -> Self:
        """Returns the record of `run`, which starts with `batch`."""
        replaced = (*(each for each in self.replaced if each != run), self.run)
        return type(self)(
            query=self.query, run=run, first_batch=batch, replaced=replaced[-_REPLACED_KEPT:]
        )

    def put(self, store: Store) -> None:
        """Records that the run has started. Raises the store's errors."""
        store.put(_path(self.query), msgspec.json.encode(self))


_decoder = msgspec.json.Decoder(QueryRun)


def load(store: Store, query: str) -> QueryRun | None:
    """Returns the newest known run of a query, if any.

    Raises `BadRequest` if the query is not a valid name, `CorruptObject`, and the store's errors.
    """
    path = _path(query)
    try:
        return _decoder.decode(store.get(path))
    except ObjectMissing:
        return None
    except msgspec.MsgspecError as error:
        raise errors.CorruptObject(path=path, check=str(error)) from error


def _path(query: str) -> str:
    return f"{manifest.query_folder(query)}/{NAME}"
