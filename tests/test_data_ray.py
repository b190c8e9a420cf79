"""`prepare` on Ray Data writes what one process writes, and goes on where it was stopped."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import ray

from lwray.cluster.prepare import ray_data_runner
from lwray.config.schema import DataSection
from lwray.data.prepare import Prepared, Work, prepare, serially
from lwray.errors import UserError

# Ray Data warns of settings that it makes itself
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")

TEXT = "".join(f"Line {n} of a text that is not long: {n * n % 1009}.\n" for n in range(800))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSection:
    monkeypatch.setattr("lwray.data.sources.PART_BYTES", 5000)
    (tmp_path / "a.txt").write_text(TEXT)
    return DataSection(source=[str(tmp_path / "a.txt")], vocab_size=300, val_share=0.1)


def everything(prepared: Prepared) -> dict[str, bytes]:
    root = prepared.directory
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_ray_is_started_where_there_is_none_and_stopped_at_the_end(data: DataSection, tmp_path: Path) -> None:
    prepare(data, tmp_path / "cache", ray_data_runner(num_cpus=1))
    assert not ray.is_initialized()


@pytest.mark.usefixtures("cluster")
def test_ray_data_writes_the_same_bytes_as_one_process(data: DataSection, tmp_path: Path) -> None:
    alone = prepare(data, tmp_path / "alone", serially)
    assert len(alone.train) > 5
    assert everything(prepare(data, tmp_path / "many", ray_data_runner())) == everything(alone)


@pytest.mark.usefixtures("cluster")
def test_a_stopped_preparation_goes_on_on_ray_without_redoing_units(data: DataSection, tmp_path: Path) -> None:
    alone = prepare(data, tmp_path / "alone", serially)

    def stops_after_three(task: Callable[[Work], None], works: Sequence[Work]) -> None:
        ray_data_runner()(task, works[:3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, tmp_path / "many", stops_after_three)
    shards = sorted((tmp_path / "many").rglob("train-*.bin"))
    before = [path.stat().st_mtime_ns for path in shards]
    assert len(before) == 3
    again = prepare(data, tmp_path / "many", ray_data_runner())
    assert [path.stat().st_mtime_ns for path in shards] == before
    assert everything(again) == everything(alone)


@pytest.mark.usefixtures("cluster")
def test_a_unit_that_cannot_be_read_is_a_user_error_as_it_is_without_ray(tmp_path: Path) -> None:
    def refuses(work: Work) -> None:
        raise UserError(f"unit {work} cannot be read")

    with pytest.raises(UserError, match=r"^unit 3 cannot be read$"):
        ray_data_runner()(refuses, [3])  # type: ignore[list-item, arg-type]
