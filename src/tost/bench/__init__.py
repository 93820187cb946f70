"""Benchmarks of operators, layers, models and training, each behind a correctness gate: `tost bench NAME`.

Every folder but `harness` is a benchmark. A new one is a folder with two modules:

- ``cases.py``, which loads no torch: a frozen dataclass with what is measured, whose fields may be options of the
  command line, and a `BENCHMARK` that names it.
- ``run.py`` (and ``tables.py`` where it is long): a subclass of `tost.bench.harness.measurement.Measurement`, which
  measures and makes the tables.

The harness provides the rest: the command with its options and help, the gate, turns and medians, a process per point,
peak memory, result files, pages and pictures.
"""
