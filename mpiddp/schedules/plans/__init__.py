"""Plans of other projects: read, proved without running them, and written for them.

``plan`` says what a plan is and ``proof`` what holds of it; ``msccl_xml`` and ``mscclpp_json`` read
and write two formats, ``traces`` writes two more; ``conversion`` makes a Schedule of a plan, and
``loading`` registers it, or what a Python file has.
"""
