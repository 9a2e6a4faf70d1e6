"""Assignment of streams to workers."""

from lm_experiments_tools.data.streaming.stream import streams_of


def test_streams_of_workers():
    assert [list(streams_of(rank, 2, 4)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [list(streams_of(rank, 3, 4)) for rank in range(3)] == [[0, 1, 2, 3]] * 3
    assert [list(streams_of(rank, 8, 4)) for rank in range(8)] == [[rank % 4] for rank in range(8)]
    for world_size in range(1, 12):
        for num_streams in range(1, 12):
            for rank in range(world_size):
                rows = {g % num_streams for g in range(rank, rank + 200 * world_size, world_size)}
                assert rows == set(streams_of(rank, world_size, num_streams))
