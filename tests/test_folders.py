from __future__ import annotations

from mlx_mtp import folders
from mlx_mtp.folders import data_folder


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(folders.sys, "platform", "linux")
    assert data_folder() == tmp_path / ".local" / "share" / "mlx-mtp"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert data_folder() == tmp_path / "data" / "mlx-mtp"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(folders.sys, "platform", "darwin")
    assert data_folder() == tmp_path / "Library" / "Application Support" / "mlx-mtp"
