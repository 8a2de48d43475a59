"""`macrobatch.audit`: watch a training program as it is, and tell how often each item counted."""

from macrobatch.auditing.main import audit
from macrobatch.auditing.report import AuditReport

__all__ = ["AuditReport", "audit"]
