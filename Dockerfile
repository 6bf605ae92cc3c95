# posttrain with pinned versions. docs/install.md says how to build and run it.
# The full image has the C compiler that kernels need at their first use; CUDA's libraries come with PyTorch's wheels.
FROM python:3.12

WORKDIR /opt/posttrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY posttrain posttrain
# torch first and pinned, as in the Makefile.
RUN pip install --no-cache-dir --constraint constraints.txt "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt '.[lora,parquet,math,tensorboard,ray]'
COPY configs configs
COPY examples examples

ENTRYPOINT ["posttrain"]
CMD ["doctor"]
