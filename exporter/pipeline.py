"""The path of a model to a pair bundle, on one page: each line is one call, into the file that does the work."""

from __future__ import annotations

from specexport.exporter.artifact import WeightsFiles
from specexport.exporter.bundle_manifest import assemble_manifest, conclude
from specexport.exporter.closing_compare import build_gates, compare_build
from specexport.exporter.compile import capture_model, choose_context_length, compile_engine
from specexport.exporter.config import BuildConfig
from specexport.exporter.contract import reconcile
from specexport.exporter.draft.capture import capture_draft
from specexport.exporter.loading import load_config, open_weights
from specexport.exporter.measure import measure_pair
from specexport.exporter.progress import Progress, Silent
from specexport.exporter.result import BuildResult
from specexport.exporter.sensitivity import choose_activations
from specexport.exporter.source import resolve
from specexport.exporter.staging import check_destination, staged_directory
from specexport.exporter.tokenizer_files import collect_tokenizer
from specexport.runtime import load


def build(config: BuildConfig, progress: Progress | None = None) -> BuildResult:
    """Make a pair bundle at ``config.output``.

    Args:
        config: What to build.
        progress: Told of every long step and of every choice that was made.

    Returns:
        What was built. A bundle that fails a gate is written too, marked, and refused by the runtime.

    Raises:
        InputError: The model, an option or the destination cannot be used.
        BuildError: The build failed. Whatever the error, nothing of the bundle is left behind.
    """
    progress = progress or Silent()
    check_destination(config.output, force=config.force)

    # What the model is. What cannot be built is refused here, before a weight is read.
    source = resolve(
        config.model,
        revision=config.revision,
        cache_dir=config.cache_dir,
        offline=config.offline,
        trust_remote_code=config.trust_remote_code,
    )
    progress.note(f"Model: {source}" + "".join(f"\n  not taken: {place}" for place in source.tried))
    config = config.resolved(source.recipe)
    model_config = load_config(source)
    tokenizer = collect_tokenizer(source, model_config)
    context_length = choose_context_length(config.context_length, model_config)
    target = capture_model("target", source, model_config, context_length=context_length, progress=progress)
    draft = capture_draft(config.draft_specification, target, config, progress)
    contract = reconcile(tokenizer.tokenizer_json, draft.tokenizer_json, target.vocab_size, draft.vocab_size)
    gates = build_gates(config, draft)

    with staged_directory(config.output, force=config.force) as stage:
        # Graphs rewritten, weights streamed into them one at a time.
        tokenizer.write(stage)
        with WeightsFiles(stage) as files:
            weights = open_weights(source, model_config)
            progress.note(f"Weights: {weights.description}")
            activations = choose_activations(target, weights, config, files, tokenizer, progress)
            target_engine = compile_engine(target, weights, config, activations, files, progress)
            draft_engine = draft.compile(config, activations, files, progress)
        draft_entry = draft.entry(draft_engine, config.num_assistant_tokens)
        manifest = assemble_manifest(config, target_engine, draft_engine, draft_entry, contract, tokenizer, stage)
        manifest.write(stage)

        # What it costs and whether it still is the model, on this machine.
        pair = load(stage, allow_failed=True)
        measured = measure_pair(pair, progress) | activations.measured()
        comparison = compare_build(pair, target, draft, gates, config, stage, progress)
        manifest = conclude(manifest, measured, comparison)
        manifest.write(stage)
    return BuildResult(config.output, manifest, comparison, (*target.notes, *tokenizer.notes, *contract.notes))
