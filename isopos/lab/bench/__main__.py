"""One measurement in this process: python -m isopos.lab.bench FUNCTION ARGUMENTS, printed as JSON."""

import json
import sys

from isopos.lab.bench.processes import FUNCTIONS

print(json.dumps(FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))))
