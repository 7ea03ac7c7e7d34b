"""Rewrites of the captured graph, one idea a file, on onnx_ir."""
