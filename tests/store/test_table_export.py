"""Tables of the catalog as Parquet files."""

import duckdb
import pytest

from nautile.common.errors import ConfigError
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.support.samples.stage_store import published


@pytest.fixture
def catalog(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    published(store, "tokens", "in")
    emit = EventWriter(store.root / "events" / "child.jsonl", "e1", stage="toy")
    for step in range(3):
        emit("metric", name="loss", step=step, value=step / 2)
    emit("sample", index=0, text="it's é")
    catalog = Catalog(store)
    catalog.ingest()
    return catalog


@pytest.mark.parametrize("table", ["artifacts", "metrics", "samples", "calls"])
def test_an_exported_table_has_all_rows(catalog, tmp_path, table):
    out = tmp_path / "it's.parquet"
    rows = catalog.export(table, out)
    with duckdb.connect() as connection:
        exported = connection.read_parquet(str(out)).fetchall()
    assert sorted(exported) == sorted(tuple(row.values()) for row in catalog.query(f"FROM {table}"))
    assert rows == len(exported)


def test_an_existing_file_is_replaced_only_with_overwrite(catalog, tmp_path):
    out = tmp_path / "x.parquet"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        catalog.export("metrics", out)
    assert out.read_text() == "mine"
    assert catalog.export("metrics", out, overwrite=True) == 3
    assert out.read_bytes()[:4] == b"PAR1"


def test_a_failed_export_is_explained_and_leaves_no_file(catalog, tmp_path):
    with pytest.raises(ConfigError, match="no table 'dreams': there are artifacts, inputs"):
        catalog.export("dreams", tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.parquet"):
        catalog.export("metrics", tmp_path / "no" / "x.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
