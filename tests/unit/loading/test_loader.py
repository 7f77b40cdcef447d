import threading
import time

import numpy as np
import pytest
import scanpy as sc
import torch
from small_store import small_store
from tiny_data import tiny_counts

from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.loading import loader
from perturbdiff.loading.cell_sets import CellSetSampler
from perturbdiff.loading.loader import SetLoader, in_order, resident
from perturbdiff.loading.set_streams import MixtureSampler
from perturbdiff.loading.windows import WindowedSampler
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store import stored_rows


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("loader"))


def make(small, *, genes=None, store=None, **kwargs):
    store = store or small.opened
    use = parts(store.conditions, read_split(small.split)) == "train"
    sampler = CellSetSampler(store.conditions, use, set_size=6, sets_per_step=4, seed=2)
    words = Vocabulary.from_conditions([store.conditions], control=store.control)
    return SetLoader([store], sampler, vocabulary=words, genes=genes or store.genes, **kwargs)


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def test_batch_holds_the_rows_of_its_sets(small):
    store, made = small.opened, make(small, stop_step=3)
    for k, batch in enumerate(made):
        sets = made.sampler.step(k)
        assert batch.target.dtype == torch.float32
        assert batch.target.shape == (4, 6, store.n_genes)
        for b, cells in enumerate(sets):
            np.testing.assert_array_equal(batch.target[b], store.expression(cells.target).toarray())
            np.testing.assert_array_equal(batch.control[b], store.expression(cells.control).toarray())
            assert batch.condition[b] == cells.condition
        labels = store.conditions["perturbation"].to_numpy()[batch.condition]
        words = Vocabulary.from_conditions([store.conditions], control=store.control)
        assert batch.perturbation.tolist() == words.encode("perturbation", labels).tolist()
    assert k == 2


def test_memory_disk_threads_and_resume_give_the_same_batches(small):
    expected = list(make(small, stop_step=5, prefetch=0))
    in_memory = resident(small.opened, 0.5)
    assert type(in_memory).__name__ == "MemoryStore"
    assert resident(small.opened, 0.0).__class__.__name__ == "Store"
    for made in (make(small, stop_step=5), make(small, store=in_memory, stop_step=5, prefetch=3)):
        assert all(same(a, b) for a, b in zip(expected, made, strict=True))
    tail = make(small, start_step=3, stop_step=5)
    assert len(tail) == 2
    assert all(same(a, b) for a, b in zip(expected[3:], tail, strict=True))
    assert tail.step == 5


def test_step_is_where_a_checkpoint_goes_on(small):
    made = make(small, stop_step=None)
    batches = iter(made)
    next(batches)
    second = next(batches)
    assert made.step == 2
    batches.close()
    assert same(second, make(small).load(made.sampler.step(1)))
    third = next(iter(made))
    assert same(third, made.load(made.sampler.step(2)))


def test_genes_are_aligned_by_name(small, caplog):
    caplog.set_level("INFO", "perturbdiff")
    store = small.opened
    genes = [store.genes[5], "not here", store.genes[0]]
    batch = next(iter(make(small, genes=genes, stop_step=1)))
    plain = next(iter(make(small, stop_step=1)))
    torch.testing.assert_close(batch.target[..., 0], plain.target[..., 5])
    torch.testing.assert_close(batch.control[..., 2], plain.control[..., 0])
    assert (batch.target[..., 1] == 0).all()
    assert "not here" in caplog.text


def test_mixture_reads_each_store_and_names_its_dataset(small):
    stores = [small.opened, small.opened.in_memory()]
    use = np.ones(len(stores[0].conditions), bool)
    samplers = [
        CellSetSampler(s.conditions, use, set_size=3, sets_per_step=1, seed=i) for i, s in enumerate(stores)
    ]
    mixed = MixtureSampler(samplers, sets_per_step=8, seed=0)
    words = Vocabulary.from_conditions(
        [s.conditions for s in stores], control="control", datasets=("a", "b", "c")
    )
    genes = stores[0].genes[::-1]
    made = SetLoader(stores, mixed, vocabulary=words, genes=genes, datasets=("c", "a"), stop_step=2)
    for k, batch in enumerate(made):
        for b, cells in enumerate(mixed.step(k)):
            np.testing.assert_array_equal(
                batch.target[b], stores[0].expression(cells.target).toarray()[:, ::-1]
            )
            assert batch.dataset[b] == (2, 0)[cells.store]
    with pytest.raises(UserError, match="do not name the 2 stores"):
        SetLoader(stores, mixed, vocabulary=words, genes=genes, datasets=("c", "x"))


def test_failures_of_a_thread_are_raised_in_their_turn(small, monkeypatch):
    made = make(small, stop_step=4, threads=2)
    real = made.sampler.step
    monkeypatch.setattr(made.sampler, "step", lambda k: real(k) if k < 2 else 1 / 0)
    batches = iter(made)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(ZeroDivisionError):
        next(batches)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_work_is_handed_over_in_order(threads):
    def work(item):
        time.sleep(0.002 * (item % 3 == 0))
        return item

    assert list(in_order(work, range(20), threads, 4)) == list(range(20))


def test_closing_ends_the_threads():
    before = threading.active_count()
    items = in_order(lambda item: item, range(10**9), 2, 3)
    assert next(items) == 0
    assert threading.active_count() == before + 2
    items.close()
    assert threading.active_count() == before


def test_a_large_store_stays_on_disk(small, monkeypatch):
    monkeypatch.setattr(loader, "available", lambda: 10)
    assert resident(small.opened, 0.5).__class__.__name__ == "Store"


def in_windows(small, store, **kwargs):
    use = np.ones(len(store.conditions), bool)
    options = {"set_size": 6, "sets_per_step": 4, "seed": 2, "window": 3, "block": 12, "mixed": 48}
    sampler = WindowedSampler(store.conditions, use, **options)
    words = Vocabulary.from_conditions([store.conditions], control=store.control)
    return SetLoader([store], sampler, vocabulary=words, genes=store.genes, **kwargs)


def test_windows_do_not_depend_on_threads_or_resumption(small, monkeypatch):
    monkeypatch.setattr(stored_rows, "CACHE_BYTES", 1)  # the threads compete for a few slots
    expected = list(in_windows(small, small.opened.in_memory(), stop_step=30, prefetch=0))
    for threads in (1, 3):
        made = in_windows(small, small.opened, stop_step=30, threads=threads, prefetch=4)
        assert all(same(a, b) for a, b in zip(expected, made, strict=True))
    tail = in_windows(small, small.opened, start_step=17, stop_step=30, threads=3, prefetch=3)
    assert all(same(a, b) for a, b in zip(expected[17:], tail, strict=True))


def test_memory_of_batches_is_used_again_when_nobody_holds_it(small):
    made = make(small, stop_step=8, prefetch=0)
    seen, kept = set(), []
    for batch in made:
        seen.add(batch.target.data_ptr())
        if len(kept) < 2:
            kept.append((batch.target[1], batch.target[1].clone()))
        del batch
    assert len(seen) < 8
    assert all(torch.equal(view, copy) for view, copy in kept)


def packed_pair(stores, genes, **kwargs):
    """Return the batches of a mixture made dense on the host, and those made dense on arrival."""
    words = Vocabulary.from_conditions([s.conditions for s in stores], control="control", datasets=("a", "b"))
    use = np.ones(len(stores[0].conditions), bool)

    def loader(packed):
        samplers = [
            CellSetSampler(s.conditions, use, set_size=5, sets_per_step=1, seed=i, quiet=True)
            for i, s in enumerate(stores)
        ]
        mixed = MixtureSampler(samplers, sets_per_step=8, seed=0)
        names = ("a", "b")[: len(stores)]
        return SetLoader(
            stores, mixed, vocabulary=words, genes=genes, datasets=names, stop_step=2, packed=packed, **kwargs
        )

    return zip(loader(False), loader(True), strict=True)


@pytest.mark.parametrize("genes", ["same", "mapped", "many"])
@pytest.mark.parametrize("kind", ["uint16", "uint32", "log1p", "both"])
def test_packed_batches_become_the_same(small, tmp_path, genes, kind):
    stores = [small.opened]
    if kind != "uint16":
        cells = tiny_counts()
        if kind == "log1p":
            sc.pp.log1p(cells)
            cells.X = cells.X.astype(np.float32)
        else:
            cells.X.data[0] = 100_000
        other = small_store(tmp_path, [f"data.input_scale={'log1p' if kind == 'log1p' else 'counts'}"], cells)
        stores = [other.opened] if kind != "both" else [small.opened, other.opened]
        assert stores[-1].dtype == ("float32" if kind == "log1p" else "uint32")
    wanted = stores[0].genes
    if genes != "same":
        wanted = [wanted[3], "not here", *wanted[:3], *wanted[9:4:-1]]
    if genes == "many":
        wanted = [f"more{i}" for i in range(40_000)] + wanted
    for dense, packed in packed_pair(stores, wanted):
        values = packed.target.values
        assert values.dtype == {"uint16": torch.int16, "log1p": torch.float32}.get(kind, torch.int32)
        assert packed.target.columns.dtype == (torch.int32 if genes == "many" else torch.int16)
        halves = packed.split(2)
        arrived = packed.to("cpu")
        for name in vars(dense):
            a, b = getattr(dense, name), getattr(arrived, name)
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            both = torch.cat([getattr(half.to("cpu"), name) for half in halves])
            torch.testing.assert_close(a, both, rtol=1e-6, atol=1e-6)
