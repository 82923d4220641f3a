import pytest


@pytest.fixture(scope="session")
def object_store_address():
    from tests.support.object_store import object_store

    with object_store() as address:
        yield address


@pytest.fixture
def machine(object_store_address, monkeypatch, tmp_path):
    """`machine("a")`: a store with a remote as the machine of that name has it, all with one remote of this test."""
    import s3fs

    from store.artifacts import Store
    from tests.support.object_store import CREDENTIALS, bucket

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store_address)
    s3fs.S3FileSystem.clear_instance_cache()
    url = f"s3://{bucket()}/run"

    def make(name):
        monkeypatch.setenv("NAUTILE_STORE_CACHE", str(tmp_path / name))
        store = Store(url)
        store.prepare()
        return store

    yield make
    s3fs.S3FileSystem.clear_instance_cache()
