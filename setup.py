"""The wheel carries `examples/` as `tilewright/examples`: `tilewright demo` and the commands of the documents work without a clone.

All else is in `pyproject.toml`. An installation in place (`pip install -e .`) finds the folder of the repository.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = Path("examples")


class BuildWithExamples(build_py):
    """Modules, and the examples beside them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._examples():
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._examples())]

    def _examples(self) -> list[tuple[Path, Path]]:
        folder = Path(self.build_lib, "tilewright")
        return [(p, folder / p) for p in sorted(EXAMPLES.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]


setup(cmdclass={"build_py": BuildWithExamples})
