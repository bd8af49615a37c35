"""Requests to a store in parallel, as many as the store answers in the time of one.

- `Store.requests_at_once` decides how many. On a disk or in memory nothing is gained: there
  everything runs in the caller's thread, one after another.
- Results have the order of the items. The error of the first item that failed is raised, once all
  calls that were begun have ended, so that none continues behind the caller's back.
- Threads belong to one call. So no caller waits for another one's requests, and a process that was
  forked from this one finds no pool without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from sparklog.storage.objects.base import Store

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(
    store: Store,
    call: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    at_once: int | None = None,
) -> list[_Result]:
    """Calls `call`, which makes requests to `store`, for each item, and returns the results.

    Calls that themselves make requests in parallel must bound either: threads are those of all
    levels together. Raises what `call` raises.

    Args:
        store: decides how many calls run at once.
        call: is called with each item, from several threads if the store is worth it.
        items: the arguments; taken before the first call.
        at_once: a smaller bound than the store's.
    """
    arguments = list(items)
    most = store.requests_at_once if at_once is None else min(at_once, store.requests_at_once)
    workers = min(most, len(arguments))
    if workers <= 1:
        return [call(each) for each in arguments]
    with ThreadPoolExecutor(workers, thread_name_prefix="sparklog-requests") as pool:
        running: list[Future[_Result]] = []
        # Where no threads are to be had, as when the interpreter ends, this one does the rest.
        with suppress(RuntimeError):
            running.extend(pool.submit(call, each) for each in arguments)
        inline = [call(each) for each in arguments[len(running) :]]
        try:
            return [each.result() for each in running] + inline
        finally:
            for future in running:
                future.cancel()
