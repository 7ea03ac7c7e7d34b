"""Makes what race.py needs: an environment for each peer, and each peer's own model file of the same weights.

python benchmarks/race_setup.py [MODEL] [--peers DIR] [--peer NAME ...] [--gguf FILE]

MODEL is what `specexport build` takes (default: the recipe smollm2-135m-instruct). Its weights, as float32, are saved
as a Hugging Face checkpoint, from which onnxruntime-genai (int4) and OpenVINO (int8) export; llama.cpp quantizes its
Q4_0 from the GGUF file that the model came from, or from --gguf. Ten minutes, most of it compiling llama.cpp.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import venv

from specexport.exporter.loading import load_config, load_reference
from specexport.exporter.source import Source, resolve
from specexport.exporter.tokenizer_files import collect_tokenizer

PEERS = pathlib.Path.home() / ".cache" / "specexport" / "peers"
TORCH = "torch==2.13.0"  # a newer one brings several GB of CUDA libraries
PACKAGES = {
    "llamacpp": ("llama-cpp-python==0.3.36",),
    "ortgenai": (TORCH, "onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers", "sentencepiece"),
    "openvino": (TORCH, "optimum-intel[openvino,nncf]", "openvino-genai"),
}
# llama.cpp's build for "this machine" takes AMX where the processor names it, and virtual machines often forbid its
# use: so name what is to be used. /proc/cpuinfo flag to option.
GGML_OPTIONS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx_vnni": "AVX_VNNI",
}
QUANTIZE = """
import sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.allow_requantize, options.ftype = True, 2  # Q4_0
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))
"""


def cmake_arguments(cpu_flags: set[str]) -> str:
    """llama.cpp's build options for a processor with these flags, AMX left out."""
    options = [f"-DGGML_{option}={'ON' if flag in cpu_flags else 'OFF'}" for flag, option in GGML_OPTIONS.items()]
    return " ".join(["-DGGML_NATIVE=OFF", *options])


def cpu_flags() -> set[str]:
    """Of the first processor; empty where there is no /proc."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def environment(directory: pathlib.Path, name: str) -> pathlib.Path:
    """The interpreter of a peer's environment, made and filled if it is not there."""
    folder = directory / name
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {', '.join(PACKAGES[name])}", flush=True)
        venv.create(folder, with_pip=True)
        extra = {"CMAKE_ARGS": cmake_arguments(cpu_flags())} if name == "llamacpp" else {}
        run([python, "-m", "pip", "install", "-q", *PACKAGES[name]], **extra)
        if name == "openvino":  # comes with optimum, for another torch, and stops it from importing
            run([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision"])
    return python


def run(command: list[object], **extra: str) -> None:
    """Run, or end with what failed."""
    done = subprocess.run([str(part) for part in command], env={**os.environ, **extra}, check=False)
    if done.returncode:
        sys.exit(f"failed (exit {done.returncode}): {' '.join(map(str, command))}")


def checkpoint(source: Source, target: pathlib.Path) -> None:
    """The source's weights as a float32 Hugging Face checkpoint with its tokenizer."""
    if not target.exists():
        print(f"writing {target}", flush=True)
        config = load_config(source)
        part = target.with_name(target.name + ".part")
        load_reference(source, config).save_pretrained(part)
        collect_tokenizer(source, config).write(part)
        part.rename(target)


def prepare(name: str, directory: pathlib.Path, gguf: pathlib.Path | None) -> None:
    """One peer's environment and model file."""
    python = environment(directory, name)
    source = directory / "checkpoint"
    if name == "ortgenai" and not (directory / "model-ortgenai").exists():
        builder = ["-m", "onnxruntime_genai.models.builder", "-m", source, "-o", directory / "model-ortgenai"]
        run([python, *builder, "-p", "int4", "-e", "cpu", "-c", directory / "ortgenai-cache"])
    if name == "openvino" and not (directory / "model-openvino").exists():
        command = [python.with_name("optimum-cli"), "export", "openvino", "-m", source]
        run([*command, "--task", "text-generation-with-past", "--weight-format", "int8", directory / "model-openvino"])
    if name == "llamacpp" and not (directory / "model-q4_0.gguf").exists():
        if gguf is None:
            sys.exit("llama.cpp needs a GGUF file of the model: give --gguf FILE, or leave it out with --peer")
        run([python, "-c", QUANTIZE, gguf, directory / "model-q4_0.gguf"])


def main() -> None:
    """Prepare all that is asked for; what is there already stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS)
    parser.add_argument("--peer", choices=tuple(PACKAGES), action="append", help="only these")
    parser.add_argument("--gguf", type=pathlib.Path)
    options = parser.parse_args()
    options.peers.mkdir(parents=True, exist_ok=True)
    source = resolve(options.model)
    checkpoint(source, options.peers / "checkpoint")
    own = source.gguf_path if source.gguf_file else None
    for name in options.peer or PACKAGES:
        prepare(name, options.peers, options.gguf or own)
        print(f"{name}: ready", flush=True)


if __name__ == "__main__":
    main()
