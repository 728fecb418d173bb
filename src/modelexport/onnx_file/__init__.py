"""Bytes on disk: protobuf fields, the model file and its data, digests, atomic writes."""
