"""What is read off the compilers' output; the compilers themselves are not here."""

import pytest

from benchmarks import machine_code

OUTPUT = """
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining input registers of a wgmma in the function 'wide_mosaic_gpu_kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'wide_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for wide_mosaic_gpu_kernel
    64 bytes stack frame, 84 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 64 bytes cumulative stack size, 1 bytes smem
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'reduce_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for reduce_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 112 registers, used 2 barriers, 1 bytes smem
"""


def test_what_ptxas_says_of_each_kernel():
    wide, reduce = machine_code.kernels(OUTPUT)
    assert wide[:4] == ("wide", 168, 84, 96)
    assert wide.serialised.startswith("non wgmma instructions defining input registers")
    assert reduce == ("reduce", 112, 0, 0, "")


def test_says_what_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        machine_code.main(["--sass", str(tmp_path)])
    assert "ptxas and nvdisasm not on the PATH" in capsys.readouterr().err
