"""The newest run of a Spark query: two runs of one query never write at the same time.

Each start of a query is another run. A run that begins takes the query over, as a driver that is
started again does after a crash. The one before writes no batch after that: its driver is one that
was thought dead, or of another query with a copy of the checkpoint, whose batches would be taken
for each other's.

The run is noted in one object, `staging/<query>/run.json`, which each batch reads and each start
replaces. Of two runs that begin at the same moment the one that put it last has begun. The note is
swept after 30 days; a run that still writes then notes itself again.
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
"""Runs before the newest one that stay refused."""


class QueryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run of `query`, and the first batch that it has committed."""

    query: str
    run: str
    first_batch: Annotated[int, Meta(ge=0)]
    replaced: tuple[str, ...] = ()
    """The runs before it, the newest last."""

    def next(self, run: str, batch: int) -> Self:
        """Returns the note of `run`, which has begun with `batch`."""
        replaced = (*(each for each in self.replaced if each != run), self.run)
        return type(self)(
            query=self.query, run=run, first_batch=batch, replaced=replaced[-_REPLACED_KEPT:]
        )

    def put(self, store: Store) -> None:
        """Notes that the run has begun. Raises the errors of the store."""
        store.put(_path(self.query), msgspec.json.encode(self))


_decoder = msgspec.json.Decoder(QueryRun)


def load(store: Store, query: str) -> QueryRun | None:
    """Returns the newest run that is known of a query.

    Raises `BadRequest` if the query is not a valid name, `CorruptObject`, and the errors of the
    store.
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
