"""The engine: a model on several GPUs or machines by Ray Serve, for pages and programs.

It is part of `demo` because it shares the queue, estimates and events of the page's service, which `inference` may not
import.
"""
