# docker build -t lm_experiments_tools . && docker run --rm -it lm_experiments_tools make pretrain
# On a machine without CUDA, point pip at torch's CPU builds and save gigabytes:
# docker build --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu -t lm_experiments_tools .
FROM python:3.11-bookworm
ARG PIP_EXTRA_INDEX_URL
WORKDIR /lm_experiments_tools
COPY . .
RUN make env
ENV PATH=/lm_experiments_tools/.venv/bin:$PATH
CMD ["bash"]
