"""Builds the native CPU kernels: C++ sources compiled once per instruction set, linked into one library.

Everything else about the package is in pyproject.toml. The library has a plain C interface and is loaded with ctypes,
so neither torch nor Python headers are needed. When it cannot be built the installation still succeeds: the reason is
kept in ``_native_build_error.txt`` beside the package, where ``tost info`` finds it, and the PyTorch path is used.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("src/tost/ops/csrc")
KERNELS = ["kernel.cpp", "gated.cpp", "step.cpp"]
BASE_FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
# Sums over a head's features may be added as a tree. Infinities and NaN keep their meaning.
BASE_FLAGS += ["-fassociative-math", "-fno-signed-zeros"]
# Registers that the processor does not have are passed between functions that are inlined only.
BASE_FLAGS += ["-Wno-psabi"]
# Last, so that they win over those above; scripts/sanitize.py optimizes less.
EXTRA_FLAGS = os.environ.get("TOST_BUILD_FLAGS", "").split()
# Instruction sets of the kernel, best first. The loader picks the first one that the processor has.
X86_TARGETS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
}


class BuildNative(build_ext):
    """Compiles the kernel per instruction set and never fails the installation."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """No ``PyInit_*``: this is a plain shared library, not a Python module."""
        return []

    def get_ext_filename(self, fullname: str) -> str:
        """No CPython tag: the same file serves every Python version. `tost.ops._library` loads this name."""
        return f"{fullname.replace('.', os.sep)}.so"

    def build_extension(self, ext: Extension) -> None:
        """Build the library, or record why it could not be built."""
        target = Path(self.get_ext_fullpath(ext.name))
        note = target.parent / "_native_build_error.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        try:
            self._build(target)
        except Exception as error:  # any compiler trouble only costs speed
            target.unlink(missing_ok=True)
            note.write_text(f"{_brief(error)}\n")
            print(
                f"tost: the native CPU kernel was not built ({error}).\n"
                "tost: everything works, but TSSA on a CPU runs on the slower PyTorch path.\n"
                "tost: install a C++17 compiler (for example `apt install g++`) and reinstall to get it.",
                file=sys.stderr,
            )

    def _build(self, target: Path) -> None:
        openmp = self._openmp_flags()
        is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
        flags = {**(X86_TARGETS if is_x86 else {}), "baseline": []}
        if wanted := os.environ.get("TOST_BUILD_ISAS", "").split():
            flags = {name: flags[name] for name in flags if name in (*wanted, "baseline")}
        common = [*BASE_FLAGS, *openmp]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = {
                name: [
                    pool.submit(self._compile, source, name, [("TOST_ISA", name)], [*common, *flags[name]])
                    for source in KERNELS
                ]
                for name in flags
            }
        built = [name for name in jobs if all(self._succeeded(name, job) for job in jobs[name])]
        objects = [path for name in built for job in jobs[name] for path in job.result()]
        macros = [(f"TOST_HAVE_{name.upper()}", "1") for name in built]
        objects += self._compile("library.cpp", "library", macros, common)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=openmp, target_lang="c++")

    @staticmethod
    def _succeeded(name: str, job: Future[list[str]]) -> bool:
        error = job.exception()
        if error is not None and name == "baseline":
            raise error
        if error is not None:
            print(f"tost: this compiler cannot build for {name}, leaving it out ({error})", file=sys.stderr)
        return error is None

    def _compile(self, source: str, folder: str, macros: list[tuple[str, str]], flags: list[str]) -> list[str]:
        output = str(Path(self.build_temp) / folder)
        compiled: list[str] = self.compiler.compile(
            [str(CSRC / source)],
            output_dir=output,
            macros=macros,
            extra_postargs=[*flags, *EXTRA_FLAGS],
            depends=_headers(),
        )
        return compiled

    def _openmp_flags(self) -> list[str]:
        probe = Path(self.build_temp) / "openmp_probe.cpp"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        try:
            self.compiler.compile([str(probe)], output_dir=str(probe.parent), extra_postargs=["-fopenmp"])
        except Exception as error:
            print(f"tost: no OpenMP, the native kernel will use one thread ({error})", file=sys.stderr)
            return []
        return ["-fopenmp"]


class PlatformWheel(bdist_wheel):
    """Tags the wheel ``py3-none-<platform>``: the library depends on the platform, not on the Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's Python, ABI and platform tags."""
        return "py3", "none", super().get_tag()[2]


def _brief(error: Exception) -> str:
    """Return what went wrong in a few words; a failed compiler reports its whole command line."""
    command = re.search(r"Command '\['([^']+)'.*?(exit status \d+|died .*)", str(error))
    if command:
        return f"{command[1]}: {command[2]}; `pip install -v .` shows why"
    return f"{type(error).__name__}: {error}"


def _headers() -> list[str]:
    return [str(path) for path in sorted(CSRC.glob("*.h"))]


setup(
    ext_modules=[Extension("tost.ops._kernels", [str(CSRC / name) for name in (*KERNELS, "library.cpp")])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
