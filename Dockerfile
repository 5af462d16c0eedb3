# The engine and the page, with the bundled model. The same image runs on CPUs and, with NVIDIA's container toolkit on
# the host, on GPUs, because torch's standard package includes CUDA. For a smaller image, name an index of torch for
# CPUs only:
#     docker build --build-arg TORCH_INDEX=URL -t dalle-lean .
FROM python:3.11-slim
ARG TORCH_INDEX=""
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE BENCHMARKS.md ./
COPY dalle_lean dalle_lean
COPY preprocessing preprocessing
COPY training training
COPY inference inference
COPY demo demo
COPY benchmarks benchmarks
COPY models models
COPY notebooks notebooks
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch torchvision; fi
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[demo,serve]'
RUN useradd --create-home drawer
USER drawer
ENTRYPOINT ["dalle-lean"]
CMD ["serve", "--host", "0.0.0.0"]
