"""PYTORCH_ALLOC_CONF is read as PyTorch reads it, and what it would refuse is refused."""

import pytest

from sim.memory.allocators import AllocatorConfError, CachingSettings, parse_alloc_conf

MIB = 1 << 20


def test_nothing_said_is_pytorchs_default():
    assert parse_alloc_conf("") == CachingSettings()


def test_the_example_of_pytorchs_own_test():
    """c10/test/core/AllocatorConfig_test.cpp."""
    settings = parse_alloc_conf(
        "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,pinned_use_background_threads:True"
    )
    assert settings.max_split_size_bytes == 40 * MIB
    assert settings.max_non_split_rounding_bytes == 30 * MIB
    assert settings.large_segment_size_bytes == 20 * MIB
    assert settings.garbage_collection_threshold == 0.5
    assert settings.expandable_segments
    sizes = (1, 32, 64, 127, 128, 256, 512, 1024, 2048, 4096, 65536)
    assert [settings.divisions_for(size * MIB) for size in sizes] == [8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1]
    assert settings.ignored == ("pinned_use_background_threads:True",)


def test_one_number_of_divisions_holds_for_all_sizes_and_spaces_do_not_matter():
    settings = parse_alloc_conf(
        " roundup_power2_divisions : 4 , large_segment_size_mb:32,per_process_memory_fraction:0.5 "
    )
    assert settings.roundup_power2_divisions == (4,) * 16
    assert settings.large_segment_size_bytes == 32 * MIB
    assert settings.per_process_memory_fraction == 0.5


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("max_split_size:128", "did you mean 'max_split_size_mb'"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("qwertyuiop:1", "known are max_split_size_mb"),
        ("max_split_size_mb:19", "at least 20, not '19'"),
        ("max_split_size_mb:12x", "not '12x'"),
        ("large_segment_size_mb:10", "at least 11"),
        ("expandable_segments:true", "True or False, not 'true'"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:much", "between 0 and 1"),
        ("per_process_memory_fraction:0", "between 0 and 1"),
        ("roundup_power2_divisions:3", "powers of two, not '3'"),
        ("roundup_power2_divisions:[100:2]", "powers of two in MiB, not '100'"),
        ("roundup_power2_divisions:[64:8", "is not closed"),
        ("roundup_power2_divisions:[64]", "not of the form size:divisions"),
        ("expandable_segments", "not of the form key:value"),
        ("backend:cudaMallocAsync", "another allocator"),
    ],
)
def test_what_pytorch_would_refuse_is_refused_with_what_would_be_right(conf, message):
    with pytest.raises(AllocatorConfError, match=message):
        parse_alloc_conf(conf)


def test_pytorch_itself_accepts_and_refuses_the_same():
    torch = pytest.importorskip("torch")
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None or torch.cuda.is_available():
        pytest.skip("this PyTorch has no such function, or a device whose allocator it would change")
    confs = [f"{key}:{value}" for key in ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb")
             for value in (10, 11, 19, 20, 128)]  # fmt: skip
    confs += [f"garbage_collection_threshold:{value}" for value in ("0.0", "0.5", "1.0")]
    confs += [f"expandable_segments:{value}" for value in ("True", "False", "true")]
    confs += [
        f"roundup_power2_divisions:{value}"
        for value in ("0", "3", "4", "[64:0,>:4]", "[64:3]", "[100:2]", "[64:8,128:2,>:1]")
    ]
    try:
        for conf in confs:
            try:
                set_settings(conf)
                accepted = True
            except (RuntimeError, ValueError):
                accepted = False
            if accepted:
                parse_alloc_conf(conf)
            else:
                with pytest.raises(AllocatorConfError):
                    parse_alloc_conf(conf)
    finally:
        set_settings("")


def test_a_newer_pytorchs_key_can_be_kept_aside():
    assert parse_alloc_conf("some_new_key:7,max_split_size_mb:64", strict=False).ignored == ("some_new_key:7",)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="16 entries"):
        CachingSettings(roundup_power2_divisions=(1, 2))
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        CachingSettings(per_process_memory_fraction=1.5)
