# An image with Polyrhythm for CPUs; for GPUs begin with one of PyTorch's own images, and leave the constraints out.
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 worker
WORKDIR /opt/polyrhythm
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
COPY examples examples
RUN pip install --no-cache-dir --constraint constraints.txt .
USER worker
WORKDIR /work
ENTRYPOINT ["polyrhythm"]
