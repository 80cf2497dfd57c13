"""Benchmarks, installed as `quest.bench`: `quest bench decode` (one decode step), `quest bench hf` (a whole model)."""
