"""Races bundles against llama.cpp, onnxruntime-genai, OpenVINO GenAI and eager Transformers, on the same prompts.

python benchmarks/race_setup.py                          # once: environments and models of the peers
python benchmarks/race.py --bundle PAIR --prompts FILE.jsonl [--num-prompts 24] [--new 128] [--rounds 3]

Every engine is a process of its own (race_worker.py), gets the same token ids, and continues them greedily by the
same number of tokens. They take turns, A B C A B C; a first turn warms up and does not count; ratios are to the first
engine, pair by pair. Machines are noisy: quote ratios and their range, not single figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import time

from specexport.exporter.bench_bandwidth import instruction_set
from specexport.exporter.bench_prompts import load_prompts
from specexport.exporter.bench_statistics import Summary, ratios
from specexport.runtime import load
from specexport.runtime.native import num_threads

WORKER = pathlib.Path(__file__).with_name("race_worker.py")
PEERS = pathlib.Path.home() / ".cache" / "specexport" / "peers"
MODELS = {
    "llamacpp": "model-q4_0.gguf",
    "ortgenai": "model-ortgenai",
    "openvino": "model-openvino",
    "transformers": "checkpoint",
}


@dataclasses.dataclass(frozen=True)
class Entrant:
    """An engine in the race: its name in the table, and the command of its process."""

    name: str
    command: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One continuation of ``tokens`` tokens behind a prompt of ``prompt``."""

    prompt: int
    tokens: int
    prefill_s: float
    decode_s: float

    @property
    def decode(self) -> float:
        """Tokens a second after the first."""
        return (self.tokens - 1) / max(self.decode_s, 1e-9)

    @property
    def prefill(self) -> float:
        """Prompt tokens a second."""
        return self.prompt / max(self.prefill_s, 1e-9)


class Process:
    """A worker that is running."""

    def __init__(self, entrant: Entrant) -> None:
        self.name = entrant.name
        self._process = subprocess.Popen(
            entrant.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, ids: list[int], new: int) -> Answer:
        """Have it continue ``ids`` by ``new`` tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ids": ids, "new": new}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(
                f"{self.name} ended (exit {self._process.wait()}); run its command by hand: {self._process.args!r}"
            )
        found = json.loads(line)
        return Answer(len(ids), len(found["ids"]), found["prefill_s"], found["decode_s"])

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def race(entrants: list[Entrant], prompts: list[list[int]], new: int, rounds: int) -> dict[str, list[Answer]]:
    """Name to answers, in the same order of prompts and rounds for all."""
    processes = [Process(entrant) for entrant in entrants]
    answers: dict[str, list[Answer]] = {entrant.name: [] for entrant in entrants}
    total, done, start = rounds * len(prompts), 0, time.perf_counter()
    for process in processes:
        process.ask(prompts[0], min(new, 16))
    for _ in range(rounds):
        for ids in prompts:
            for process in processes:
                answers[process.name].append(process.ask(ids, new))
            done += 1
            if sys.stderr.isatty():
                left = (time.perf_counter() - start) * (total / done - 1)
                print(f"\r{done} of {total}, {left:.0f} s left\x1b[K", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for process in processes:
        process.close()
    return answers


def table(answers: dict[str, list[Answer]]) -> str:
    """Markdown: medians, and the ratio to the first engine with the range of its middle 80 %."""
    base = next(iter(answers.values()))
    lines = ["| engine | decode tok/s | to the first | prefill tok/s | to the first |", "|---|---|---|---|---|"]
    for name, found in answers.items():
        cells = []
        for pick in ("decode", "prefill"):
            speeds, first = [getattr(a, pick) for a in found], [getattr(a, pick) for a in base]
            ratio = Summary.of(ratios(speeds, first))
            cells.append(f"{Summary.of(speeds).median:.1f}")
            cells.append(f"{ratio.median:.2f} ({ratio.p10:.2f} to {ratio.p90:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def entrants(options: argparse.Namespace, threads: int) -> list[Entrant]:
    """Peers whose environment is there, then the bundles, plain and speculative."""
    found = []
    for name in options.peer or MODELS:
        python, model = options.peers / name / "bin" / "python", options.peers / MODELS[name]
        if name == "transformers":
            python = pathlib.Path(sys.executable)
        if not python.exists() or not model.exists():
            print(f"{name} is left out: {model if python.exists() else python} is not there", file=sys.stderr)
            continue
        command = (str(python), str(WORKER), name, str(model), str(threads))
        found.append(Entrant(name, command))
        if options.lookup and name != "transformers":
            found.append(Entrant(f"{name}, lookup", (*command, str(options.lookup))))
    for bundle in options.bundle:
        for drafted in (0, *options.num_assistant_tokens):
            name = f"{pathlib.Path(bundle).name}, {f'{drafted} drafted' if drafted else 'plain'}"
            found.append(Entrant(name, (sys.executable, str(WORKER), "specexport", bundle, str(threads), str(drafted))))
    return found


def main() -> None:
    """Race and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", action="append", required=True, help="repeatable; the first's tokenizer is used")
    parser.add_argument("--prompts", type=pathlib.Path, help="JSON lines, as specexport bench takes them")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, help="instead: prompts of the files' texts cut to just so many")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--num-assistant-tokens", type=int, action="append", default=[])
    parser.add_argument("--peer", choices=tuple(MODELS), action="append", help="only these, in this order")
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS, help="where race_setup.py put them")
    parser.add_argument("--lookup", type=int, help="peers with prompt lookup as well, so many tokens a round")
    parser.add_argument("--json", type=pathlib.Path, help="write every answer")
    options = parser.parse_args()
    pair = load(options.bundle[0], num_threads=options.threads)
    found = load_prompts(pair.tokenizer, options.prompts, count=options.num_prompts, longest=options.max_prompt_tokens)
    prompts = [list(prompt.ids) for prompt in found]
    if options.prompt_tokens:
        text = [token for prompt in prompts for token in prompt]
        prompts = [
            (text[at:] + text * (1 + options.prompt_tokens // len(text)))[: options.prompt_tokens] for at in (0, 7)
        ]
    threads = options.threads or num_threads()
    del pair
    answers = race(entrants(options, threads), prompts, options.new, options.rounds)
    print(
        f"{len(prompts)} prompts, {options.new} new tokens, {options.rounds} rounds, {threads} threads, "
        f"{instruction_set()}\n"
    )
    print(table(answers))
    if options.json:
        options.json.write_text(json.dumps({n: [dataclasses.asdict(a) for a in f] for n, f in answers.items()}) + "\n")


if __name__ == "__main__":
    main()
