"""The caches of transformers: which models keep a window of tokens, and a cache that keeps all."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


def growing_cache(has_encoder: bool) -> Any:
    """Return an empty cache that keeps all tokens."""
    caches = importlib.import_module("transformers.cache_utils")
    if has_encoder:
        return caches.EncoderDecoderCache(caches.DynamicCache(), caches.DynamicCache())
    return caches.DynamicCache()


def slides(model: Any) -> bool:
    """Return whether the cache of a model keeps a window of tokens, and drops earlier ones."""
    return any(_windows(model))


def common_window(model: Any) -> int:
    """Return how many tokens each layer of the cache keeps; 0 unless all keep the same number."""
    windows = set(_windows(model))
    return windows.pop() if len(windows) == 1 else 0


def _windows(model: Any) -> Sequence[int]:
    """Return the window of each layer of the cache of a model, 0 for a layer that keeps all."""
    caches = importlib.import_module("transformers.cache_utils")
    try:
        own = caches.DynamicCache(config=model.config.get_text_config(decoder=True))
        return [int(layer.sliding_window) if layer.is_sliding else 0 for layer in own.layers]
    except (AttributeError, TypeError, ValueError):  # a model with a cache of its own kind
        return []
