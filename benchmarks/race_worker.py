"""One engine of a race: reads {"ids": [...], "new": n} a line, answers {"ids": [...], "prefill_s": s, "decode_s": s}.

python race_worker.py ENGINE MODEL THREADS [DRAFTED]

Runs in the engine's own environment, so it imports nothing of specexport unless that is the engine. DRAFTED tokens a
round come from prompt lookup (0: plain). `decode_s` covers the tokens after the first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Answer = tuple[list[int], float, float]
Generate = Callable[[list[int], int], Answer]


def specexport(model: str, threads: int, drafted: int) -> Generate:
    """Ours."""
    from specexport.runtime import load

    pair = load(model, num_threads=threads)

    def generate(ids: list[int], new: int) -> Answer:
        options = {"max_new_tokens": new, "do_sample": False, "ignore_eos": True, "repetition_penalty": 1.0}
        output = pair.generate(ids, num_assistant_tokens=drafted, **options)
        return output.token_ids, output.metrics.prefill_s, output.metrics.decode_s

    return generate


def transformers(model: str, threads: int, drafted: int) -> Generate:
    """Eager, bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(ids: list[int], new: int) -> Answer:
        start = time.perf_counter()
        output = eager(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        tokens = [int(output.logits[0, -1].argmax())]
        first = time.perf_counter()
        while len(tokens) < new:
            output = eager(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
        return tokens, first - start, time.perf_counter() - first

    return generate


def llamacpp(model: str, threads: int, drafted: int) -> Generate:
    """llama.cpp through llama-cpp-python; the cache stays float16, its fastest."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None
    engine = Llama(
        model, n_ctx=8192, n_threads=threads, n_threads_batch=threads, verbose=False, draft_model=lookup,
        logits_all=bool(drafted),
    )  # fmt: skip

    def generate(ids: list[int], new: int) -> Answer:
        engine.reset()
        tokens: list[int] = []
        start = first = time.perf_counter()
        if drafted:
            for token in engine.generate(ids, temp=0.0, repeat_penalty=1.0, top_k=1):
                tokens.append(int(token))
                first = time.perf_counter() if len(tokens) == 1 else first
                if len(tokens) == new:
                    break
        else:
            engine.eval(ids)
            tokens.append(int(engine.sample(temp=0.0, repeat_penalty=1.0)))
            first = time.perf_counter()
            while len(tokens) < new:
                engine.eval(tokens[-1:])
                tokens.append(int(engine.sample(temp=0.0, repeat_penalty=1.0)))
        return tokens, first - start, time.perf_counter() - first

    return generate


def ortgenai(model: str, threads: int, drafted: int) -> Generate:
    """onnxruntime-genai."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    engine = onnxruntime_genai.Model(config)

    def generate(ids: list[int], new: int) -> Answer:
        params = onnxruntime_genai.GeneratorParams(engine)
        length = len(ids) + new
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        if drafted:
            params.set_speculative_options(max_draft_tokens=drafted, ngram_size=3)
        generator = onnxruntime_genai.Generator(engine, params)
        start = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = time.perf_counter()
        while not generator.is_done() and len(generator.get_sequence(0)) < length:
            generator.generate_next_token()
        end = time.perf_counter()
        return [int(token) for token in generator.get_sequence(0)[len(ids) : length]], first - start, end - first

    return generate


def openvino(model: str, threads: int, drafted: int) -> Generate:
    """OpenVINO GenAI."""
    import numpy as np
    import openvino as ov
    import openvino_genai

    options = {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if drafted else {})}
    pipeline = openvino_genai.LLMPipeline(model, "CPU", **options)

    def generate(ids: list[int], new: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.do_sample, config.ignore_eos = False, True
        if drafted:
            config.num_assistant_tokens, config.max_ngram_size = drafted, 3
        prompt = ov.Tensor(np.array([ids], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        start = time.perf_counter()
        output = pipeline.generate(openvino_genai.TokenizedInputs(prompt, mask), config)
        total = time.perf_counter() - start
        prefill = output.perf_metrics.get_ttft().mean / 1e3
        return [int(token) for token in output.tokens[0]], prefill, total - prefill

    return generate


ENGINES = {function.__name__: function for function in (specexport, transformers, llamacpp, ortgenai, openvino)}


def main() -> None:
    """Answer until the input ends."""
    name, model, threads, *rest = sys.argv[1:]
    # Libraries write to standard output as they please: only answers may reach the race.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = ENGINES[name](model, int(threads), int(rest[0]) if rest else 0)
    for line in sys.stdin:
        job = json.loads(line)
        tokens, prefill, decode = generate(job["ids"], job["new"])
        print(json.dumps({"ids": tokens, "prefill_s": prefill, "decode_s": decode}), file=answers, flush=True)


if __name__ == "__main__":
    main()
