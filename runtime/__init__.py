"""Loads pair bundles and decodes speculatively: numpy, onnxruntime and tokenizers only."""
