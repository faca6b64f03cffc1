"""A build backend that only copies the metadata of a source package.

`pip download` prepares the metadata of a source package with the package's own backend, which may need torch or a
compiler. A source package carries its metadata already, in PKG-INFO; this backend returns that.
"""

import email
import pathlib


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    text = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    headers = email.message_from_string(text)
    folder = f"{headers['Name'].replace('-', '_')}-{headers['Version']}.dist-info"
    pathlib.Path(metadata_directory, folder).mkdir()
    pathlib.Path(metadata_directory, folder, "METADATA").write_text(text, encoding="utf-8")
    return folder
