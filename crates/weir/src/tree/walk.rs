//! Visits and verifies every node of a tree, for fsck.
//!
//! No cache: what counts is what is on the device. Unlike the other readers, a walk does not stop
//! at the first error: it reports it, leaves out that subtree, and goes on. It ends on any bytes:
//! a path has at most [`MAX_LEVEL`] + 1 nodes, and a walk visits at most as many nodes as the
//! volume has room for.

use super::cache::read_node;
use super::{TreeRoot, inconsistent};
use crate::device::{Device, IoClass};
use crate::format::node::{ChildRef, Expectation, MAX_LEVEL, Node};
use crate::format::{Key, NODE_BLOCKS, VolumeId};
use crate::{Error, Result};
use std::ops::ControlFlow;

/// Something that is wrong in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalkProblem {
    /// First block of the node that is left out; 0 for the tree as a whole.
    pub block: u64,
    /// Level that it should have.
    pub level: u8,
    /// First key of what is missing; `None` for everything from the start.
    pub from: Option<Key>,
    /// What is wrong.
    pub error: Error,
}

/// Is told about everything that a [`walk`] finds; `Break` ends the walk.
pub trait Visitor {
    /// A valid node, before its contents. All its keys are in the range that its parent gives it.
    fn node(&mut self, node: &Node) -> ControlFlow<()>;
    /// An item, in key order.
    fn item(&mut self, key: Key, value: &[u8]) -> ControlFlow<()>;
    /// Something is wrong.
    fn problem(&mut self, problem: WalkProblem) -> ControlFlow<()>;
    /// Now and then: how many of the nodes that the root counts have been visited.
    fn progress(&mut self, _visited_nodes: u64, _node_count: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// What a walk saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WalkSummary {
    /// Valid nodes.
    pub nodes: u64,
    /// Items in them.
    pub items: u64,
    /// Problems reported.
    pub problems: u64,
    /// The visitor ended the walk early.
    pub interrupted: bool,
}

/// The volume that a tree is in.
#[derive(Clone, Copy)]
pub struct WalkVolume<'a> {
    /// Where to read.
    pub device: &'a dyn Device,
    /// The volume.
    pub volume_id: VolumeId,
    /// Its size.
    pub total_blocks: u64,
}

/// Visits every node and item of tree `tree` in key order.
pub fn walk(
    volume: WalkVolume<'_>,
    root: &TreeRoot,
    tree: u8,
    visitor: &mut dyn Visitor,
) -> WalkSummary {
    let mut walker =
        Walker { volume, root, tree, visitor, path: Vec::new(), summary: WalkSummary::default() };
    if walker.run().is_break() {
        walker.summary.interrupted = true;
    }
    walker.summary
}

/// Nodes between two calls of [`Visitor::progress`].
const PROGRESS_NODES: u64 = 256;

struct Walker<'a> {
    volume: WalkVolume<'a>,
    root: &'a TreeRoot,
    tree: u8,
    visitor: &'a mut dyn Visitor,
    /// Interior nodes from the root down: the next slot to visit, and where the node's range ends.
    path: Vec<(Node, usize, Option<Key>)>,
    summary: WalkSummary,
}

impl Walker<'_> {
    fn run(&mut self) -> ControlFlow<()> {
        if !self.root.is_empty() {
            self.visit(self.root.child_ref(), self.root.level, None, None)?;
        }
        while let Some((node, slot, end)) = self.path.last_mut() {
            let Some((key, child)) = node.key(*slot).zip(node.child(*slot)) else {
                self.path.pop();
                continue;
            };
            *slot += 1;
            let end = node.key(*slot).or(*end);
            let level = node.level() - 1;
            self.visit(child, level, Some(key), end)?;
        }
        self.check_counts()
    }

    /// Reads a node; tells the visitor; an interior one is put on the path.
    fn visit(
        &mut self,
        child: ChildRef,
        level: u8,
        from: Option<Key>,
        end: Option<Key>,
    ) -> ControlFlow<()> {
        if self.summary.nodes >= self.volume.total_blocks / NODE_BLOCKS {
            let error = inconsistent(child.block, "more nodes than the volume has room for");
            self.problem(WalkProblem { block: child.block, level, from, error })?;
            return ControlFlow::Break(());
        }
        let node = match self.read(child, level, from, end) {
            Ok(node) => node,
            Err(error) => {
                return self.problem(WalkProblem { block: child.block, level, from, error });
            }
        };
        self.summary.nodes += 1;
        if self.summary.nodes.is_multiple_of(PROGRESS_NODES) {
            self.visitor.progress(self.summary.nodes, self.root.node_count)?;
        }
        self.visitor.node(&node)?;
        if level > 0 {
            self.path.push((node, 0, end));
            return ControlFlow::Continue(());
        }
        for slot in 0..node.count() {
            if let Some((key, value)) = node.key(slot).zip(node.value(slot)) {
                self.summary.items += 1;
                self.visitor.item(key, value)?;
            }
        }
        ControlFlow::Continue(())
    }

    fn read(
        &self,
        child: ChildRef,
        level: u8,
        from: Option<Key>,
        end: Option<Key>,
    ) -> Result<Node> {
        let WalkVolume { device, volume_id, total_blocks } = self.volume;
        if level > MAX_LEVEL {
            return Err(inconsistent(child.block, "level too high"));
        }
        let expected = Expectation { volume_id, child, level };
        let node = read_node(device, total_blocks, &expected, IoClass::Background)?;
        if node.tree() != self.tree {
            return Err(inconsistent(child.block, "of another tree"));
        }
        if from.is_some() && node.first_key() != from {
            return Err(inconsistent(child.block, "does not start at its separator"));
        }
        if end.is_some_and(|end| node.last_key() >= Some(end)) {
            return Err(inconsistent(child.block, "reaches beyond the next separator"));
        }
        Ok(node)
    }

    /// The root's counts; with nodes left out they cannot match and say nothing.
    fn check_counts(&mut self) -> ControlFlow<()> {
        let (summary, root) = (self.summary, self.root);
        if summary.problems > 0
            || (summary.nodes == root.node_count && summary.items == root.item_count)
        {
            return ControlFlow::Continue(());
        }
        let error = Error::Corrupt(format!(
            "tree: {} nodes and {} items, its root counts {} and {}",
            summary.nodes, summary.items, root.node_count, root.item_count
        ));
        self.problem(WalkProblem { block: 0, level: root.level, from: None, error })
    }

    fn problem(&mut self, problem: WalkProblem) -> ControlFlow<()> {
        self.summary.problems += 1;
        self.visitor.problem(problem)
    }
}
