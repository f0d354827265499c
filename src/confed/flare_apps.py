"""Import path of confed 0.1 for the classes of a FLARE job; :mod:`confed.deployment.flare.job` defines them.

Startup kits of 0.1 allow ``confed.flare_apps.Member`` alone at a site, so jobs of this release still name it. The next
release names :class:`confed.deployment.flare.job.FlareSite` and removes this module.
"""

from confed.deployment.flare.job import FlareServer as Leader
from confed.deployment.flare.job import FlareSite as Member

__all__ = ["Leader", "Member"]
