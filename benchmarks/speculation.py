"""Plain against speculative greedy decoding, prompt by prompt in turn: are the ids equal, and what does it bring?

python benchmarks/speculation.py BUNDLE PROMPTS.jsonl [--prompts 48] [--new 128] [--num-assistant-tokens K]

PROMPTS.jsonl holds one object a line with `turns`, `prompt`, `text` or `messages`, and maybe `category`.
Exits 1 if any id differs.
Speeds of the two are taken one after the other on each prompt, so quote their ratio.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
import sys

from specexport.runtime import load


def read_prompts(path: pathlib.Path, count: int) -> list[tuple[str, list[dict[str, str]]]]:
    """``count`` prompts spread over the file, each with its category."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [(str(row.get("category", "all")), messages(row)) for row in chosen]


def messages(row: dict[str, object]) -> list[dict[str, str]]:
    """A row as a conversation."""
    if isinstance(found := row.get("messages"), list):
        return found
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) else row.get("prompt") or row.get("text")
    return [{"role": "user", "content": str(text)}]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("prompts_file", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--num-assistant-tokens", type=int)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    pair = load(options.bundle, num_threads=options.threads)
    different, ratios, rounds, plain_speed = [], collections.defaultdict(list), [], []
    for number, (category, prompt) in enumerate(read_prompts(options.prompts_file, options.prompts)):
        ids = pair.tokenizer.encode_chat(prompt)[-options.max_prompt_tokens :]
        common = {"max_new_tokens": options.new, "do_sample": False, "ignore_eos": True}
        plain = pair.generate(ids, num_assistant_tokens=0, **common)
        speculative = pair.generate(ids, num_assistant_tokens=options.num_assistant_tokens, **common)
        if plain.token_ids != speculative.token_ids:
            different.append(number)
        ratios[category].append(plain.metrics.decode_s / speculative.metrics.decode_s)
        rounds.append(speculative.metrics.tokens_per_step)
        plain_speed.append(plain.metrics.tokens_per_second)
        progress = f"\r{number + 1} prompts" if sys.stderr.isatty() else ""
        print(progress, end="", file=sys.stderr, flush=True)
    every = [ratio for values in ratios.values() for ratio in values]
    for category, values in sorted(ratios.items()):
        print(f"{category:24} speculative / plain {statistics.median(values):5.2f} ({len(values)} prompts)")
    tokens = statistics.mean(rounds)
    print(f"all: speculative / plain {statistics.median(every):.2f}, tokens a verify {tokens:.2f}")
    print(f"plain decoding, median {statistics.median(plain_speed):.0f} tokens/s")
    print(f"prompts whose ids differ: {len(different)} of {len(every)} {different or ''}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
