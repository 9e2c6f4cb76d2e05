"""The documentation does what it says: its code runs, its links lead somewhere.

Fenced code blocks of README.md and docs/*.md are carried out in order, each file in a folder of its own:

* ```` ```python ```` is executed; all blocks of a file share their names.
* ```` ```console ```` (lines that start with `$`) and ```` ```bash ````: lines that start with `kvtwin` are run. Anything
  else in them is for the reader only.
* Words after the language say more: `file=NAME` writes the block to that file instead, `exit=2` is the exit status that
  every command of the block must have, `check` compares the output shown in a console block with the real one, where
  `...` stands for any text and white space counts as equal.
* Blocks in another language, or none, are for the reader only.

Commands that mention `$KVTWIN_DATA` need the public traces. Without them the rest is carried out, and the test is
reported as skipped, or fails when KVTWIN_REQUIRE_DATA is set.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DATA = Path(os.environ.get("KVTWIN_DATA", ROOT.parent / "shared" / "data")).resolve()
COMMAND_TIMEOUT_S = 300

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block."""

    language: str
    words: tuple[str, ...]
    """What follows the language in the opening fence."""
    line: int
    """Line number of the first line of code."""
    text: str

    def value(self, key: str) -> str | None:
        """The value of the word `key=value`, if it is there."""
        return next((word.removeprefix(f"{key}=") for word in self.words if word.startswith(f"{key}=")), None)


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and the output shown after it."""

    line: int
    text: str
    shown: str


def blocks_of(text: str) -> list[Block]:
    """All fenced code blocks, in order."""
    blocks: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = re.match(r"(\s*)(`{3,})(\S*)\s*(.*)$", lines[number])
        number += 1
        if not opening:
            continue
        start = number
        while number < len(lines) and lines[number].strip() != opening[2]:
            number += 1
        code = textwrap.dedent("\n".join(lines[start:number])) + "\n"
        blocks.append(Block(opening[3], tuple(shlex.split(opening[4])), start + 1, code))
        number += 1
    return blocks


def commands_of(block: Block) -> list[Command]:
    """The command lines of a console or bash block, continuation lines joined."""
    prompt = "$ " if block.language == "console" else ""
    commands: list[Command] = []
    lines = block.text.splitlines()
    number = 0
    while number < len(lines):
        line, first = lines[number], number
        number += 1
        if not line.startswith(prompt):
            continue
        while line.endswith("\\") and number < len(lines):
            line = line[:-1] + " " + lines[number].removeprefix("> ").strip()
            number += 1
        shown = number
        while prompt and number < len(lines) and not lines[number].startswith(prompt):
            number += 1
        commands.append(Command(block.line + first, line.removeprefix(prompt), "\n".join(lines[shown:number])))
    return commands


@pytest.fixture(scope="session")
def shell_path(tmp_path_factory):
    """A PATH on which `kvtwin` is this checkout's command, run by this interpreter."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "kvtwin"
    python = shlex.quote(sys.executable)
    code = "import sys; from experiments.cli import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec {python} -c "{code}" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def run(shell_path, tmp_path):
    """Run one command line as a reader would, in the document's folder; gives the completed process."""
    environment = {
        **os.environ,
        "PATH": shell_path,
        "PYTHONPATH": str(ROOT),
        "KVTWIN_DATA": str(DATA),
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }

    def run_line(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    return run_line


@each_document
def test_its_code_runs_and_does_what_it_says(path, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTWIN_DATA", str(DATA))
    name = path.relative_to(ROOT).as_posix()
    namespace: dict[str, object] = {"__name__": "__docs__"}
    left_out: list[str] = []
    for block in blocks_of(path.read_text(encoding="utf-8")):
        if "KVTWIN_DATA" in block.text and not DATA.is_dir() and os.environ.get("KVTWIN_REQUIRE_DATA") != "1":
            left_out.append(f"{name}:{block.line}")
        elif target := block.value("file"):
            (tmp_path / target).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            exec(code, namespace)
        elif block.language in ("console", "bash"):
            expected_exit = int(block.value("exit") or 0)
            for command in commands_of(block):
                if command.text.startswith("kvtwin"):
                    done = run(command.text)
                    said = f"{name}:{command.line}: {command.text}\nexit status {done.returncode}\n{done.stdout}{done.stderr}"
                    assert done.returncode == expected_exit, said
                    if "check" in block.words:
                        assert same_text(command.shown, done.stdout + done.stderr), (
                            f"{said}\nshown was:\n{command.shown}"
                        )
    if left_out:
        pytest.skip(f"not run, for want of the public traces in KVTWIN_DATA: {', '.join(left_out)}")


def same_text(shown: str, real: str) -> bool:
    """Whether the output shown is the real one, up to white space and `...`."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown.strip() + "\n", real.strip() + "\n", options)


@each_document
def test_its_links_lead_somewhere(path):
    text = re.sub(r"^(`{3,}).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(found), f"{path.name} links to {target}"


def anchors_of(path: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_code_that_is_run():
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [command for block in blocks if block.language == "console" for command in commands_of(block)]
    assert {command.text.split()[1] for command in commands if command.text.startswith("kvtwin")} >= {
        "run", "ledger", "compare", "capacity",
    }  # fmt: skip
    assert any(block.language == "python" for block in blocks)


# ── nothing is left out ──────────────────────────────────────────────────────────────────────────────────────────────
def flags_of_the_commands() -> dict[str, set[str]]:
    """Every long option, by command."""
    from typer.main import get_command

    from experiments.cli import app

    def flags_of(command) -> set[str]:
        own = {
            flag
            for parameter in command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
            if flag.startswith("--") and flag != "--help"
        }
        return own.union(*(flags_of(part) for part in getattr(command, "commands", {}).values()))

    return {name: flags_of(command) for name, command in get_command(app).commands.items()}


def test_every_command_and_every_flag_is_documented_and_no_other():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    flags = flags_of_the_commands()
    assert set(re.findall(r"^## `kvtwin (\w+)`$", text, re.MULTILINE)) == set(flags)
    documented = set(re.findall(r"--[a-z][a-z-]*", text)) - {"--help"}
    assert documented == set().union(*flags.values())


def test_every_key_of_the_results_is_defined():
    import sim

    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))
    workload = {"workload": "azure-conv", "num_requests": 5}
    result = sim.simulate(
        sim.Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", workload=workload, slo="ttft_p99=2.0")
    )
    assert set(result.summary) - defined == set()
    assert set(result.requests.columns) - defined == set()
    assert set(result.timeline.columns) - defined == set()


def test_every_key_of_a_scenario_is_documented():
    from sim.scenario_tables import TABLE_OF_KEY

    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = " ".join(re.findall(r"`([^`\n]+)`", text)).replace("-", "_")  # a flag is its key with dashes
    set_somewhere = re.findall(r"^(\w+) = ", text, re.MULTILINE)  # in an example
    assert set(TABLE_OF_KEY) - set(re.findall(r"[a-z]\w*", named)) - set(set_somewhere) == set()


def test_every_trace_format_and_every_built_in_workload_is_documented():
    from sim.workload import WORKLOADS
    from sim.workload.readers import FORMATS

    text = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for known in FORMATS:
        assert any(all(column in row for column in known.columns if column != "hash_ids") for row in rows), known.name
    for name in WORKLOADS:
        assert any(row.startswith(f"| `{name}` |") for row in rows), name


# ── the mechanism itself ─────────────────────────────────────────────────────────────────────────────────────────────
DOCUMENT = """\
Text.

```toml file=a.toml
[run]
```

- a list

  ```python
  x = 1
  ```

```console check
$ kvtwin run \\
> a.toml
done in ... s
$ ls
a.toml
```
"""


def test_blocks_know_their_language_words_and_line():
    toml, python, console = blocks_of(DOCUMENT)
    assert (toml.language, toml.value("file"), toml.line, toml.text) == ("toml", "a.toml", 4, "[run]\n")
    assert (python.language, python.line, python.text) == ("python", 10, "x = 1\n")
    assert (console.language, console.words) == ("console", ("check",))


def test_a_console_block_is_commands_and_the_output_shown_after_each():
    first, second = commands_of(blocks_of(DOCUMENT)[2])
    assert first == Command(14, "kvtwin run  a.toml", "done in ... s")
    assert second == Command(17, "ls", "a.toml")


def test_output_is_compared_up_to_white_space_and_dots():
    assert same_text("done in ... s", "done  in 0.3 s\n")
    assert not same_text("done in ... s", "failed in 0.3 s\n")
