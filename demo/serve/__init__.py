"""The engine: a model on several GPUs or machines by Ray Serve, for pages and programs.

It stands in `demo`, beside the page's service, because it shares that one's line, estimates and events; `inference`
may import none of them.
"""
