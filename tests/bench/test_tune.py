"""tune: the file that auto follows is measured, continued after an interruption, and explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends.bench import ship
from attn_backends.bench import tune as module
from attn_backends.bench.presets import Preset, preset
from attn_backends.bench.roofline import ModelShape
from attn_backends.bench.tune import Job, jobs_for, tune
from attn_backends.registry import (
    TuningFile,
    TuningPoint,
    TuningRow,
    load_tuning,
    ranking,
    shape_bucket,
    shipped,
    write_tuning,
)
from attn_backends.registry.shipped import Measured

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = {"batches": (1,), "lengths": (8, 16)}
TOY = ModelShape("toy", 4, 2, 16, 1)


def _jobs(**more: Any) -> list[Job]:
    return jobs_for([Preset(TOY, TOY)], CPU, **{**TINY, **more})


def _point(kv_len: int, **times: float) -> TuningPoint:
    return TuningPoint(batch=1, q_len=1, kv_len=kv_len, num_heads=4, median_us=times)


def test_jobs_cover_both_phases_and_layouts_before_they_repeat_one() -> None:
    jobs = _jobs()
    kinds = [(job.phase, job.bucket.rpartition("-")[2]) for job in jobs]
    assert set(kinds[:4]) == set(kinds) and len(set(kinds)) == 4
    assert len(jobs) == 8 and len({(j.phase, j.bucket, j.shape) for j in jobs}) == 8
    assert {job.phase for job in _jobs(phases=("decode",))} == {"decode"}
    for job in jobs:
        assert job.bucket == shape_bucket(job.case.spec)
        assert (job.case.q_len == 1) == (job.phase == "decode")


def test_the_shapes_of_mla_are_those_it_has() -> None:
    jobs = jobs_for([preset("deepseek")], CPU)
    widths = {(job.phase, job.bucket.split("-G")[0], job.case.page_size) for job in jobs}
    assert widths == {("decode", "D576-DV512", 64), ("prefill", "D192-DV128", None)}


def test_models_of_one_bucket_share_a_row() -> None:
    both = jobs_for([preset("llama3-70b"), preset("qwen3-32b")], CPU)
    assert len(both) == len(jobs_for([preset("llama3-70b")], CPU))


def test_a_gpu_gets_through_a_preset_in_few_points() -> None:
    assert 10 <= len(jobs_for([preset("llama3-8b")], torch.device("cuda"))) <= 20


@pytest.mark.parametrize(
    ("more", "word"),
    [({"phases": ("both",)}, "phase='both'"), ({"lengths": (0,)}, "length=0")],
)
def test_jobs_that_are_none_are_refused(more: dict, word: str) -> None:
    with pytest.raises(ab.InvalidInputError, match=word):
        _jobs(**more)


def test_auto_follows_what_was_measured_and_explain_shows_it(
    tmp_path: Path, register: Callable[..., str]
) -> None:
    slow = register("toy_slow", sleep=0.01)
    path = tmp_path / "new" / "tuning.json"
    jobs = _jobs(phases=("decode",))
    outcome = tune(path, jobs, CPU, backends=["torch_native", slow], rounds=2)
    assert (outcome.measured, outcome.known, outcome.left) == (len(jobs), 0, 0)
    spec = jobs[0].case.spec
    row = load_tuning(path).find("cpu", "decode", shape_bucket(spec))
    assert row is not None and row.median_us[slow] > row.median_us["torch_native"] > 0
    assert [p.kv_len for p in row.points] == [8, 16]
    assert all(p.mode == {"torch_native": "eager", slow: "eager"} for p in row.points)

    config = ab.AttentionConfig(tuning_file=str(path))
    options = {"phase": "decode", "device": "cpu", "config": config}
    assert ab.select(spec, **options).name == "torch_native"
    swapped = {"torch_native": row.median_us[slow], slow: row.median_us["torch_native"]}
    write_tuning(path, load_tuning(path).with_row(row.model_copy(update={"median_us": swapped})))
    assert ab.select(spec, **options).name == slow

    choice = ab.explain(spec, **options)["decode"]
    assert choice.measured is not None and choice.measured.median_us == swapped
    text = str(choice)
    for point in row.points:
        assert f"1 x 1 over {point.kv_len}: " in text
        assert f"{slow} {point.median_us[slow]:g} us" in text
    assert choice.to_dict()["measured"]["points"][0]["kv_len"] == 8


def test_without_a_row_nothing_is_said_to_be_measured() -> None:
    spec = _jobs()[0].case.spec
    choice = ab.explain(spec, phase="decode", device="cpu")["decode"]
    assert choice.measured is None and choice.to_dict()["measured"] is None


def test_an_interrupted_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "t.json", []
    real = module.measure_job

    def measure(job: Job, *args: Any) -> TuningPoint:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job)
        return real(job, *args)

    monkeypatch.setattr(module, "measure_job", measure)
    with pytest.raises(KeyboardInterrupt):
        tune(path, _jobs(), CPU, backends=["torch_native"], rounds=1)
    before = load_tuning(path)
    assert sum(len(row.points) for row in before.rows) == 3

    monkeypatch.setattr(module, "measure_job", real)
    steps = []
    outcome = tune(
        path, _jobs(), CPU, backends=["torch_native"], rounds=1,
        progress=lambda job, measured: steps.append(measured),
    )  # fmt: skip
    assert (outcome.measured, outcome.known) == (5, 3)
    assert sorted(steps) == [False] * 3 + [True] * 5
    kept = {(r.bucket, r.phase, p.shape): p.median_us for r in before.rows for p in r.points}
    now = {(r.bucket, r.phase, p.shape): p.median_us for r in outcome.tuning.rows for p in r.points}
    assert {key: now[key] for key in kept} == kept and len(now) == 8
    again = tune(path, _jobs(), CPU, backends=["torch_native"], rounds=1, again=True)
    assert (again.measured, again.known) == (8, 0)


def test_other_backends_or_versions_are_measured_again(
    tmp_path: Path, register: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, jobs = tmp_path / "t.json", _jobs(phases=("decode",))
    tune(path, jobs, CPU, backends=["torch_native"], rounds=1)
    name = register("toy_more")
    more = tune(path, jobs, CPU, backends=["torch_native", name], rounds=1)
    assert more.measured == len(jobs) and more.dropped == 0
    assert name in more.tuning.rows[0].median_us
    foreign = more.tuning.rows[0].model_copy(update={"device": "Other GPU"})
    write_tuning(path, more.tuning.with_row(foreign))
    monkeypatch.setattr(torch, "__version__", "99.0")
    upgraded = tune(path, jobs[:1], CPU, backends=["torch_native"], rounds=1)
    assert (upgraded.measured, upgraded.dropped) == (1, 2)
    assert {row.device for row in upgraded.tuning.rows} == {"cpu", "Other GPU"}


def test_the_budget_ends_a_run_between_points(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    outcome = tune(path, _jobs(), CPU, backends=["torch_native"], rounds=1, budget_s=1e-9)
    assert (outcome.measured, outcome.left) == (0, 8) and not path.exists()
    outcome = tune(path, _jobs(), CPU, backends=["torch_native"], rounds=1)
    assert (outcome.measured, outcome.left) == (8, 0)
    with pytest.raises(ab.InvalidInputError, match="budget"):
        tune(path, _jobs(), CPU, budget_s=0)


def test_wrong_and_refusing_backends_are_never_first(
    tmp_path: Path, register: Callable[..., str]
) -> None:
    names = [register("toy_scaled", scale=1.5), register("toy_raises", error="no kernel image")]
    path, jobs = tmp_path / "t.json", _jobs(phases=("decode",), lengths=(8,))
    tune(path, jobs, CPU, backends=[*names, "torch_native", "torch_varlen"], rounds=1)
    for row in load_tuning(path).rows:
        assert list(row.median_us) == ["torch_native"]
        refused = row.points[0].refused
        assert "wrong: error" in refused["toy_scaled"]
        assert "no kernel image" in refused["toy_raises"]
        assert "device=cpu" in refused["torch_varlen"]


def test_the_file_says_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    path = tmp_path / "t.json"
    said = "attn-backends tune x"
    tune(path, _jobs()[:1], CPU, backends=["torch_native"], rounds=1, command=said)
    meta = load_tuning(path).meta
    assert meta["command"] == said and meta["commit"] == "abc1234"
    assert meta["torch"] == torch.__version__ and meta["date"]
    assert meta["devices"]["cpu"]["commit"] == "abc1234"


def test_options_and_unknown_names_are_refused(tmp_path: Path) -> None:
    for name in ("triton:hopper=false", "no_such_backend"):
        with pytest.raises(ab.AttnBackendsError):
            tune(tmp_path / "t.json", _jobs(), CPU, backends=[name])


# --- the file -----------------------------------------------------------------------------------


def test_a_row_sums_up_by_geometric_mean_over_points_of_all() -> None:
    points = [_point(8, a=1.0, b=2.0), _point(16, a=100.0), _point(32)]
    row = TuningRow.of("cpu", "decode", "x", points)
    assert row is not None and row.median_us == {"a": 10.0} and len(row.points) == 3
    assert TuningRow.of("cpu", "decode", "x", [_point(8, a=1.0), _point(16, b=1.0)]) is None
    assert TuningRow.of("cpu", "decode", "x", []) is None


def test_a_row_takes_the_place_of_the_one_before() -> None:
    first, other = (TuningRow.of("cpu", "decode", n, [_point(8, a=1.0)]) for n in "xy")
    newer = TuningRow.of("cpu", "decode", "x", [_point(8, a=9.0)])
    assert first is not None and other is not None and newer is not None
    file = TuningFile(rows=[first, other]).with_row(newer)
    assert file.rows == [other, newer]


def test_a_file_without_points_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"rows": [{"device": "cpu", "phase": "decode", "bucket": "x", "median_us": {"a": 1}}]}'
    )
    assert load_tuning(path).rows[0].points == ()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    row = TuningRow.of("cpu", "decode", "x", [_point(8, a=1.0)])
    assert row is not None
    write_tuning(path, TuningFile(rows=[row]))
    old = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ab.InvalidInputError, match="No space left"):
        write_tuning(path, TuningFile(rows=[]))
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ab.InvalidInputError, match="tuning_file"):
        write_tuning(tmp_path / "file" / "t.json", TuningFile(rows=[]))


def test_the_order_of_a_phase_is_by_distance_from_the_fastest() -> None:
    rows = [
        TuningRow(device=device, phase=phase, bucket=bucket, median_us=times)
        for device, phase, bucket, times in (
            ("cpu", "decode", "x", {"a": 1.0, "b": 2.0, "c": 1.1}),
            ("cpu", "decode", "y", {"a": 900.0, "b": 100.0}),
            ("cpu", "prefill", "x", {"z": 1.0}),
            ("gpu", "decode", "x", {"y": 1.0}),
        )
    ]
    assert module.order_of(TuningFile(rows=rows), "cpu", "decode") == ["c", "b", "a"]


def test_a_point_that_fails_for_all_is_kept_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.measure_case

    def measure(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.case.kv_len == 8:
            raise torch.OutOfMemoryError("out of memory")
        return real(x, *args, **kwargs)

    monkeypatch.setattr(module, "measure_case", measure)
    path, jobs = tmp_path / "t.json", _jobs(phases=("decode",))
    outcome = tune(path, jobs, CPU, backends=["torch_native"], rounds=1)
    assert outcome.measured == len(jobs)
    for row in outcome.tuning.rows:
        assert {p.kv_len: bool(p.median_us) for p in row.points} == {8: False, 16: True}
        assert "out of memory" in row.points[0].refused["torch_native"]


def _h200(file: Path) -> str:
    gpu, meta = "NVIDIA H200", {"date": "2026-01-02", "commit": "abc1234"}
    rows = [
        TuningRow(device=gpu, phase="decode", bucket="A", median_us={"x": 2.0, "y": 4.0}),
        TuningRow(device=gpu, phase="decode", bucket="B", median_us={"y": 1.0, "x": 1.5}),
        TuningRow(device=gpu, phase="prefill", bucket="A", median_us={"torch_native": 1.0, "y": 2}),
    ]
    write_tuning(file, TuningFile(meta={**meta, "devices": {gpu: meta}}, rows=rows))
    return str(file)


def test_shipped_rankings_come_from_tuning_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ship.table([_h200(tmp_path / "tuning.json")])
    made: dict[str, Any] = {"Measured": Measured}
    exec(text, made)
    found = made["MEASURED"]["sm90"]
    assert (found.gpu, found.date, found.commit) == ("NVIDIA H200", "2026-01-02", "abc1234")
    assert found.orders == {"prefill": ("y",), "decode": ("x", "y")}  # 1.22 against 1.41
    assert found.rows["decode", "B"] == {"y": 1.0, "x": 1.5}
    monkeypatch.setattr(ranking, "MEASURED", made["MEASURED"])
    order = ranking.shipped_order("sm90", "decode", "B")
    assert order[:2] == ("y", "x") and order[-1] == "torch_native"
    assert ranking.shipped_order("sm90", "prefill", "A")[0] == "y"
    assert ranking.shipped_order("sm90", "decode", "C") == ranking.SHIPPED["sm90"]["decode"]
    assert "measured on NVIDIA H200, 2026-01-02" in ranking.source_of("sm90")


def test_no_architecture_is_guessed_or_given_twice(tmp_path: Path) -> None:
    file = _h200(tmp_path / "tuning.json")
    with pytest.raises(SystemExit, match="sm90 was in a file before"):
        ship.table([file, file])
    with pytest.raises(SystemExit, match="gpu=GeForce"):
        ship.architecture_of("GeForce")


def test_the_module_that_ships_is_made_from_the_published_files() -> None:
    files = sorted((ROOT / "docs/results").glob("*/tuning.json"))
    assert ship.written([str(f) for f in files]) == Path(shipped.__file__).read_text(), (
        "run python -m attn_backends.bench.ship docs/results/*/tuning.json"
    )
