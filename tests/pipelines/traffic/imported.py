"""What commands import, in a process that does nothing else: those that are forked from it begin at once."""

import vlmdistill.cli.main
import vlmdistill.drafters.training.trainer
import vlmdistill.pipelines.bench.evaluate
import vlmdistill.pipelines.bench.side_by_side
import vlmdistill.pipelines.data.features.capturer
import vlmdistill.pipelines.report.page
import vlmdistill.pipelines.targets.loading
import vlmdistill.pipelines.targets.vision_language
import vlmdistill.pipelines.traffic.adapt
import vlmdistill.pipelines.traffic.forget  # noqa: F401
