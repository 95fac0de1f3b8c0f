# An image for GPU machines: docker build -t hflow .
# docs/cluster.md, "Install on GPU machines", says why in this order.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libnccl-dev python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/hflow/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3.12 -m venv /opt/hflow

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hflow hflow
COPY configs configs
COPY recipes recipes
RUN pip install '.[vllm,data,lora,math,serve]'

# What is compiled against the installed torch: the extras transformer-engine and flash-attn, and the address
# of FlashAttention 3, which is no extra.
ARG KERNELS=
ARG FLASH_ATTN_3=
RUN test -z "$KERNELS$FLASH_ATTN_3" || (pip install hatchling ninja packaging psutil pybind11 setuptools wheel \
    && MAX_JOBS=8 pip install --no-build-isolation ${KERNELS:+".[$KERNELS]"} $FLASH_ATTN_3)

WORKDIR /work
CMD ["hflow", "doctor"]
