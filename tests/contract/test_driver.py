"""Launches of the driver: arguments lie where kernels look for them, however often they change."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest

from attn_backends import driver, triton_compiled

WORD = ctypes.c_void_p
SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int, WORD, WORD, WORD, WORD)


class FakeDriver:
    """Stands in for the driver's library: reads every launch back from memory."""

    def __init__(self, formats: str) -> None:
        self.formats, self.launches, self.codes = formats, [], []
        self.cuLaunchKernelEx = SIGNATURE(self.launch)
        self.bound = 0

    def launch(self, config, function, table, extra) -> int:
        head = struct.unpack("<7I4x3Q", ctypes.string_at(config, 56))
        grid, block, shared, stream = head[:3], head[3:6], head[6], head[7]
        attributes = [
            struct.unpack("<i4xi60x", ctypes.string_at(head[8] + 72 * i, 72))
            for i in range(head[9])
        ]
        at = (WORD * len(self.formats)).from_address(table)
        args = tuple(
            struct.unpack(f, ctypes.string_at(at[i], driver.SIZES[f]))[0]
            for i, f in enumerate(self.formats)
        )
        assert extra is None
        self.launches.append((function, grid, block, shared, stream, attributes, args))
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code, text) -> int:
        text._obj.value = b"no such thing"
        return 0


@pytest.fixture
def fake(monkeypatch):
    def install(formats: str) -> FakeDriver:
        library = FakeDriver(formats)
        monkeypatch.setattr(driver, "_library", lambda: library)
        monkeypatch.setattr(driver, "_launch_function", lambda: library.cuLaunchKernelEx)
        return library

    return install


def test_every_argument_is_aligned_to_its_own_size():
    assert driver.offsets("QiqfdI") == [0, 8, 16, 24, 32, 40]
    assert driver.offsets("iQ") == [0, 8]
    assert driver.offsets("iiQf") == [0, 4, 8, 16]


def test_a_launch_says_where_and_with_what(fake):
    formats = "QQifqd"
    library = fake(formats)
    values = (1, 2, -3, 0.5, 1 << 40, 2.25)
    launch = driver.Launch(77, (5, 6, 7), 96, formats, values, 2, shared=4096)
    launch(9, 2**63, 8)
    launch(10, 3, 4)
    first, second = library.launches
    assert first == (77, (5, 6, 7), (96, 1, 1), 4096, 9, [], (2**63, 8, *values[2:]))
    assert second == (77, (5, 6, 7), (96, 1, 1), 4096, 10, [], (3, 4, *values[2:]))


def test_all_arguments_may_change_and_pdl_is_an_attribute(fake):
    library = fake("Qfi")
    launch = driver.Launch(1, (1, 1, 1), 32, "Qfi", (1, 1.0, 1), 3, pdl=True)
    for args in ((1, 0.25, -5), (2, 8.0, 7)):
        launch(0, *args)
        assert library.launches[-1][-2:] == ([(6, 1)], args)


def test_threads_do_not_see_each_others_arguments(fake):
    library = fake("QQQ")
    launch = driver.Launch(1, (1, 1, 1), 32, "QQQ", (0, 0, 0), 3)

    def work(n: int) -> None:
        for _ in range(300):
            launch(n, n, n, n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launches) == 1200
    assert all(len({x[4], *x[-1]}) == 1 for x in library.launches)


def test_memory_that_a_launch_leaves_is_written_anew(fake):
    library = fake("Qif")
    for n in (1, 2, 3):
        launch = driver.Launch(n, (n, n, n), 32 * n, "Qif", (0, n, n / 2), 1, shared=n, pdl=n == 2)
        launch(n, 10 * n)
        launch.anew((9, 1, 1), 7, (5, 6, 0.5))
        del launch
    attributes = [[], [(6, 1)], []]
    for n in (1, 2, 3):
        first, anew = library.launches[2 * n - 2 : 2 * n]
        assert first == (n, (n, n, n), (32 * n, 1, 1), n, n, attributes[n - 1], (10 * n, n, n / 2))
        assert anew == (n, (9, 1, 1), (32 * n, 1, 1), n, 7, attributes[n - 1], (5, 6, 0.5))


def test_a_filled_launch_keeps_its_stream_and_arguments(fake, monkeypatch):
    library = fake("Qi")
    launch = driver.Launch(3, (2, 1, 1), 64, "Qi", (0, 5), 1, pdl=True)
    first, second = launch.filled(7, 70), launch.filled(8, 80)
    launch(9, 90)
    launch.anew((4, 1, 1), 1, (1, 1))
    del launch
    for filled in (first, second, first):
        filled()
    assert [(x[4], x[-1]) for x in library.launches[2:]] == [
        (7, (70, 5)),
        (8, (80, 5)),
        (7, (70, 5)),
    ]
    assert all(x[:2] == (3, (2, 1, 1)) and x[5] == [(6, 1)] for x in library.launches[2:])
    library.codes = [1]
    with pytest.raises(RuntimeError, match=r"no such thing \(1\)"):
        first()
    bound, library.codes = [], [201]
    monkeypatch.setattr(driver, "bind_context", lambda: bound.append(1))
    second()  # in a thread without a context
    assert bound == [1] and library.launches[-1][4] == 8


def test_a_refused_launch_raises_with_the_drivers_words(fake):
    library = fake("Q")
    library.codes = [1]
    launch = driver.Launch(1, (1, 1, 1), 32, "Q", (0,), 1)
    with pytest.raises(RuntimeError, match=r"no such thing \(1\)"):
        launch(0, 5)
    launch(0, 6)
    assert library.launches[-1][-1] == (6,)


def test_a_thread_without_a_context_gets_one_and_launches_again(fake, monkeypatch):
    library = fake("Q")
    library.codes = [201]
    bound = []
    monkeypatch.setattr(driver, "bind_context", lambda: bound.append(1))
    driver.Launch(1, (1, 1, 1), 32, "Q", (0,), 1)(0, 5)
    assert bound == [1] and [x[-1] for x in library.launches] == [(5,), (5,)]


def compiled_kernel(signature, **more):
    meta = {
        "global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1,
        "launch_cooperative_grid": False, "num_warps": 4, "shared": 128, "launch_pdl": False,
        **more,
    }  # fmt: skip
    src = SimpleNamespace(signature=dict(enumerate(signature)))
    return SimpleNamespace(metadata=SimpleNamespace(**meta), src=src, run=None, function=5)


def known_parameters(monkeypatch, formats):
    found = [(at, driver.SIZES[f]) for at, f in zip(driver.offsets(formats), formats)]
    monkeypatch.setattr(driver, "parameters", lambda function: found)


def test_a_kernel_of_triton_is_launched_without_its_constants(fake, monkeypatch):
    library = fake("QQifQQ")
    known_parameters(monkeypatch, "QQifQQ")  # the kernel's own, and two of scratch memory
    compiled = compiled_kernel(["*fp32", "*bf16", "constexpr", "i32", "fp32", "constexpr"])
    launch = triton_compiled.form_of(compiled).launch((3, 1, 1), (1, 2, 1, 7, 0.5, True), 2)
    launch(4, 10, 20)
    assert library.launches == [(5, (3, 1, 1), (128, 1, 1), 128, 4, [], (10, 20, 7, 0.5, 0, 0))]


@pytest.mark.parametrize(
    "signature, known, more",
    [
        (["*fp32", "i32"], "Qq", {}),  # the kernel has another argument there
        (["*fp32", "i32"], "QiQQQ", {}),  # more than scratch memory behind
        (["*fp32", "i32"], "Q", {}),
        (["*fp32", "nvTmaDesc"], "QQ", {}),
        (["*fp32", "i32"], "Qi", {"num_ctas": 2}),
        (["*fp32", "i32"], "Qi", {"global_scratch_size": 64}),
        (["*fp32", "i32"], "Qi", {"launch_cooperative_grid": True}),
    ],
)
def test_what_does_not_fit_is_left_to_triton(fake, monkeypatch, signature, known, more):
    fake("Qi")
    known_parameters(monkeypatch, known)
    assert triton_compiled.form_of(compiled_kernel(signature, **more)) is None


def test_what_changes_must_be_an_argument(fake, monkeypatch):
    fake("i")
    known_parameters(monkeypatch, "i")
    form = triton_compiled.form_of(compiled_kernel(["constexpr", "i32"]))
    assert form.launch((1, 1, 1), (0, 0), 1) is None
    assert form.launch((1, 1, 1), (0, 0, 0), 0) is None
    assert form.launch((1, 1, 1), (0, 0), 0) is not None


def test_a_triton_that_looks_otherwise_is_left_alone(fake, monkeypatch):
    fake("Qi")
    known_parameters(monkeypatch, "Qi")
    assert triton_compiled.form_of(SimpleNamespace()) is None
    monkeypatch.setattr(driver, "parameters", lambda function: None)
    compiled = compiled_kernel(["*fp32", "i32"])
    assert triton_compiled.form_of(compiled) is None
