"""NuGet packages that are the same bytes wherever they are packed, and what packing them needs instead of a feed.

    nupkg.py stand-in ID VERSION FOLDER ASSEMBLY FEED    a package of one assembly, which the SDK has itself
    nupkg.py finish PACKAGE EPOCH RESULT                 a package that the SDK packed, with the same entries for the same files
"""

import hashlib
import os
import re
import sys
import time
import zipfile

README = "README.md"


def stand_in(name, version, folder, assembly, feed):
    """What an SDK without a feed restores in the place of a package that it refers to by itself. It is compiled against and not packed."""
    os.makedirs(feed, exist_ok=True)
    with zipfile.ZipFile(os.path.join(feed, f"{name}.{version}.nupkg"), "w") as package:
        package.writestr(f"{name}.nuspec", f"<package><metadata><id>{name}</id><version>{version}</version><authors>-</authors>"
                                           "<description>-</description></metadata></package>")
        package.write(assembly, f"{folder}/{os.path.basename(assembly)}")


def finished(entries):
    """Entries by name, without what differs from one packing to the next, and with what NuGet 5.4 does not know."""
    # The properties have a random name, and their relation an identifier that is made of it.
    (old,) = [name for name in entries if name.endswith(".psmdcp")]
    properties = entries.pop(old)
    new = f"{os.path.dirname(old)}/{hashlib.sha256(properties).hexdigest()[:32]}.psmdcp"
    relation = re.compile(rf'Target="/{re.escape(old)}" Id="R[0-9A-F]+"'.encode())
    entries["_rels/.rels"], count = relation.subn(f'Target="/{new}" Id="RPROPERTIES"'.encode(), entries["_rels/.rels"])
    assert count == 1, entries["_rels/.rels"]
    entries[new] = properties
    # The page that NuGet shows is named since NuGet 5.10. Packages of symbols have none.
    (manifest,) = [name for name in entries if name.endswith(".nuspec")]
    if README in entries and b"<readme>" not in entries[manifest]:
        entries[manifest], count = re.subn(rb"(\r?\n *)<description>", rb"\1<readme>" + README.encode() + rb"</readme>\g<0>", entries[manifest])
        assert count == 1, entries[manifest]
    return entries


def finish(packed, epoch, result):
    with zipfile.ZipFile(packed) as package:
        entries = {entry.filename: package.read(entry) for entry in package.infolist()}
    moment = time.gmtime(int(epoch))[:6]
    with zipfile.ZipFile(result, "w") as package:
        for name, data in sorted(finished(entries).items()):
            entry = zipfile.ZipInfo(name, moment)
            entry.external_attr = 0o100644 << 16
            package.writestr(entry, data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    command, arguments = sys.argv[1], sys.argv[2:]
    {"stand-in": stand_in, "finish": finish}[command](*arguments)
