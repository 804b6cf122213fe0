"""The page: one self-contained HTML file that says what was learned, and shows it.

| file | what happens there |
|---|---|
| `build.py` | a document in, a page out, below its limit of bytes |
| `content.py` | what of a document the page embeds: checked, cleaned, columns in place of records |
| `pictures.py` | arrays as small PNG pictures |
| `document.py` | the document of a `Fit` |
| `dynamics.py` | conserved quantities as a question, and their flows |
| `extract.py` | calibration, filters, anchors, examples and costs out of a trained network |
| `notebook.py` | a reading in a notebook |
| `page.html`, `page.css` | the frame and its style |
| `draw.js`, `chart.js`, `table.js` | elements and numbers; curves; tables that sort |
| `layers.js`, `symmetries.js`, `parts.js`, `page.js` | the parts of a question; the page |
"""

from symrazor.page.build import page_html as page_html
from symrazor.page.build import write_page as write_page
from symrazor.page.document import document_of as document_of
from symrazor.page.document import document_of_runs as document_of_runs
from symrazor.page.extract import anchors_of as anchors_of
from symrazor.page.extract import calibration_bins as calibration_bins
from symrazor.page.extract import filters_of as filters_of
from symrazor.page.extract import layer_costs as layer_costs
